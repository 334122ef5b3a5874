// Runs an exported file in ONNX Runtime Web's WebAssembly build, and writes what it says as JSON.
//   node run_export.mjs FILE.onnx FEEDS.json
// FEEDS.json: {name: {type, dims, values}}; written to standard output: {name: {type, dims, values}}.
import { readFileSync } from "node:fs";
import * as ort from "onnxruntime-web";

ort.env.wasm.numThreads = 1;
const [file, feedsFile] = process.argv.slice(2);
const options = { executionProviders: ["wasm"], logSeverityLevel: 3 };
const session = await ort.InferenceSession.create(new Uint8Array(readFileSync(file)), options);

const arrays = {
  float32: (values) => Float32Array.from(values),
  int64: (values) => BigInt64Array.from(values, BigInt),
};
const described = JSON.parse(readFileSync(feedsFile, "utf8"));
const feeds = {};
for (const name of session.inputNames) {
  const { type, dims, values } = described[name];
  feeds[name] = new ort.Tensor(type, arrays[type](values), dims);
}
const results = await session.run(feeds);
const said = {};
for (const name of session.outputNames) {
  const { type, dims, data } = results[name];
  said[name] = { type, dims, values: Array.from(data, Number) };
}
console.log(JSON.stringify(said));
