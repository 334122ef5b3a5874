// Copies given rows of several tensors: select, buffer and merge of engine/backends/base.py.

#include "row_copy.cuh"

extern "C" __global__ void __launch_bounds__(1024)
    gather_rows(const __grid_constant__ GatherRows gather) {
    const RowList rows{gather.rows, 1, gather.count};
    copy_rows(gather.tensors, gather.tensor_count, rows, blockIdx.x, gridDim.x);
}
