//! Dequantisation is compared with candle.

use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{Device, Tensor};

use super::*;
use crate::reference::random;

/// Goal: for blocks quantised by candle, dequantisation gives the same values as candle for every
/// type.
#[test]
fn dequantised_values_match_candle() {
    let weights: Vec<f32> = random(1, 4096).iter().map(|w| w * w * w).collect();
    let tensor = Tensor::from_slice(&weights, weights.len(), &Device::Cpu).unwrap();
    for (dtype, ggml) in [
        (TensorType::Q8_0, GgmlDType::Q8_0),
        (TensorType::Q4K, GgmlDType::Q4K),
        (TensorType::Q5K, GgmlDType::Q5K),
        (TensorType::Q6K, GgmlDType::Q6K),
    ] {
        let quantised = QTensor::quantize(&tensor, ggml).unwrap();
        let want: Vec<f32> = quantised.dequantize(&Device::Cpu).unwrap().to_vec1().unwrap();
        let mut got = vec![0.0; weights.len()];
        dequantise(dtype, &quantised.data().unwrap(), &mut got);
        for (index, (got, want)) in got.iter().zip(&want).enumerate() {
            assert!((got - want).abs() <= 1e-6, "{dtype:?} {index}: {got}, candle {want}");
        }
    }
}
