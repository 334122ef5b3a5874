/* A library of one operator for ONNX Runtime: tests.offramp:Squash, y = x / (1 + |x|), float32.

   Written against the stable part of ONNX Runtime's C interface by the places of its functions in
   the table that a library is given, since the headers come with no Python package. */
#include <math.h>
#include <stddef.h>
#include <stdint.h>

typedef void *(*Function)(void);
struct Base { const Function *(*functions)(uint32_t version); };
enum { ADD_DOMAIN = 28, CREATE_DOMAIN = 26, ADD_OPERATOR = 27, DATA = 51, SIZES = 61, SHAPE = 62,
       ELEMENTS = 64, TYPE_AND_SHAPE = 65, INPUT = 90, OUTPUT = 91, RELEASE_SHAPE = 99 };
enum { FLOAT32 = 1, VERSION = 8, MOST_SIZES = 8 };

struct Operator {
    uint32_t version;
    void *(*create)(const struct Operator *, const Function *, const void *);
    const char *(*name)(const struct Operator *);
    const char *(*provider)(const struct Operator *);
    int (*input_type)(const struct Operator *, size_t);
    size_t (*inputs)(const struct Operator *);
    int (*output_type)(const struct Operator *, size_t);
    size_t (*outputs)(const struct Operator *);
    void (*compute)(void *, void *);
    void (*destroy)(void *);
    int (*input_needed)(const struct Operator *, size_t);
    int (*output_needed)(const struct Operator *, size_t);
    void *newer[16]; /* of later versions, which are not looked at */
};

#ifndef RELEASE
#define RELEASE 1
#endif
const int release = RELEASE; /* files of two releases differ */

static const Function *api;

static void *create(const struct Operator *op, const Function *functions, const void *info) {
    (void)op; (void)info;
    return (void *)functions;
}
static const char *name(const struct Operator *op) { (void)op; return "Squash"; }
static const char *provider(const struct Operator *op) { (void)op; return NULL; }
static int type(const struct Operator *op, size_t at) { (void)op; (void)at; return FLOAT32; }
static size_t one(const struct Operator *op) { (void)op; return 1; }
static int required(const struct Operator *op, size_t at) { (void)op; (void)at; return 0; }
static void destroy(void *kernel) { (void)kernel; }

static void compute(void *kernel, void *context) {
    const Function *call = kernel;
    const void *x;
    void *y, *shape;
    float *from, *to;
    size_t count, elements;
    int64_t sizes[MOST_SIZES];
    ((void *(*)(void *, size_t, const void **))call[INPUT])(context, 0, &x);
    ((void *(*)(const void *, void **))call[TYPE_AND_SHAPE])(x, &shape);
    ((void *(*)(void *, size_t *))call[SIZES])(shape, &count);
    ((void *(*)(void *, int64_t *, size_t))call[SHAPE])(shape, sizes, count);
    ((void *(*)(void *, size_t *))call[ELEMENTS])(shape, &elements);
    ((void (*)(void *))call[RELEASE_SHAPE])(shape);
    ((void *(*)(void *, size_t, const int64_t *, size_t, void **))call[OUTPUT])(
        context, 0, sizes, count, &y);
    ((void *(*)(const void *, float **))call[DATA])(x, &from);
    ((void *(*)(const void *, float **))call[DATA])(y, &to);
    for (size_t i = 0; i < elements; i++) to[i] = from[i] / (1.0f + fabsf(from[i]));
}

static const struct Operator squash = { VERSION, create, name, provider, type, one, type, one,
                                        compute, destroy, required, required, { NULL } };

void *RegisterCustomOps(void *options, const struct Base *base) {
    void *domain;
    api = base->functions(VERSION);
    ((void *(*)(const char *, void **))api[CREATE_DOMAIN])("tests.offramp", &domain);
    ((void *(*)(void *, const struct Operator *))api[ADD_OPERATOR])(domain, &squash);
    return ((void *(*)(void *, void *))api[ADD_DOMAIN])(options, domain);
}
