//! One linear layer from 2,048 to 6,144 features, computed by Stolon's kernels or by another crate:
//! `linear LIBRARY THREADS`, a worker of `rivals.py` like `stolon-rivals`.
//!
//! * `linear ROWS`: multiplies ROWS rows; prints the seconds of the fastest of three runs.
//!
//! Libraries: `stolon-bf16`, `stolon-f32`, `gemm-f32` (the crate that candle uses) and
//! `matrixmultiply-f32`.

use std::io::{BufRead, Write};
use std::time::Instant;

use stolon_kernels::{Matrix, Path, TensorType, Threads};

const INNER: usize = 2048;
const FEATURES: usize = 6144;
/// Strides between rows of the activations and weights, and between rows of the products.
const INNER_STRIDE: isize = INNER as isize;
const FEATURES_STRIDE: isize = FEATURES as isize;

type Error = Box<dyn std::error::Error>;
/// Multiplies activations `[rows, INNER]`. The second argument is the number of rows, the third one
/// is the result, `[rows, FEATURES]`.
type Product = Box<dyn FnMut(&[f32], usize, &mut [f32])>;

fn main() -> Result<(), Error> {
    let arguments: Vec<String> = std::env::args().collect();
    let [_, library, threads] = arguments.as_slice() else {
        return Err("expected: linear LIBRARY THREADS".into());
    };
    let begun = Instant::now();
    let weights = values(FEATURES * INNER);
    let (mut product, description) = product(library, threads.parse()?, weights)?;
    println!("ready {:.3} {description}", begun.elapsed().as_secs_f64());
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        let Some(rows) = line.strip_prefix("linear ") else {
            return Err(format!("no such command: {line}").into());
        };
        let rows = rows.trim().parse()?;
        let (x, mut out) = (values(rows * INNER), vec![0.0; rows * FEATURES]);
        let mut run = || {
            let begun = Instant::now();
            product(&x, rows, &mut out);
            begun.elapsed().as_secs_f64()
        };
        println!("{:.6}", (0..3).map(|_| run()).fold(f64::INFINITY, f64::min));
        std::io::stdout().flush()?;
    }
    Ok(())
}

fn values(count: usize) -> Vec<f32> {
    (0..count).map(|index| ((index * 2_654_435_761) % 1000) as f32 / 500.0 - 1.0).collect()
}

fn product(library: &str, threads: usize, weights: Vec<f32>) -> Result<(Product, String), Error> {
    Ok(match library {
        "stolon-bf16" | "stolon-f32" => {
            let path = Path::detect()?;
            let bf16 = |w: &f32| ((w.to_bits() + 0x8000) >> 16) as u16;
            let (dtype, bytes): (_, Vec<u8>) = match library {
                "stolon-f32" => {
                    (TensorType::F32, weights.iter().flat_map(|w| w.to_le_bytes()).collect())
                }
                _ => {
                    (TensorType::Bf16, weights.iter().flat_map(|w| bf16(w).to_le_bytes()).collect())
                }
            };
            let matrix = Matrix::pack(dtype, FEATURES, INNER, &bytes, path)?;
            let threads = Threads::new(threads);
            (
                Box::new(move |x, rows, out| matrix.matmul(&threads, x, rows, out)),
                path.name().to_owned(),
            )
        }
        "gemm-f32" => (
            Box::new(move |x, rows, out| {
                let parallelism = gemm::Parallelism::Rayon(threads);
                // SAFETY: sizes and strides are those of the slices; weights are `[FEATURES,
                // INNER]`.
                unsafe {
                    gemm::gemm(
                        rows,
                        FEATURES,
                        INNER,
                        out.as_mut_ptr(),
                        1,
                        FEATURES_STRIDE,
                        false,
                        x.as_ptr(),
                        1,
                        INNER_STRIDE,
                        weights.as_ptr(),
                        INNER_STRIDE,
                        1,
                        0.0,
                        1.0,
                        false,
                        false,
                        false,
                        parallelism,
                    );
                }
            }),
            "f32".to_owned(),
        ),
        "matrixmultiply-f32" => (
            Box::new(move |x, rows, out| {
                // SAFETY: as above.
                unsafe {
                    matrixmultiply::sgemm(
                        rows,
                        INNER,
                        FEATURES,
                        1.0,
                        x.as_ptr(),
                        INNER_STRIDE,
                        1,
                        weights.as_ptr(),
                        1,
                        INNER_STRIDE,
                        0.0,
                        out.as_mut_ptr(),
                        FEATURES_STRIDE,
                        1,
                    );
                }
            }),
            "f32; threads by MATMUL_NUM_THREADS".to_owned(),
        ),
        other => return Err(format!("no such library: {other}").into()),
    })
}
