//! Tests the CUDA kernels without a GPU: their source is compiled as C++ for the host, and its
//! results are compared with those of plain loops. This checks arithmetic, indices and barriers,
//! not the launch. It needs a C++ compiler, `c++` or `$CXX`.

mod kernels {
    mod draw;
    mod gate;
    mod host;
    mod kv_write;
    mod recurrence;
    mod split_attention;
}
