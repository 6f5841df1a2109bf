//! The types of candle, the reference for quantization.

use candle_core::quantized::GgmlDType;
use stolon_checkpoint::TensorType;

/// The type of candle, if candle can quantize to it.
pub(crate) fn candle_type(dtype: TensorType) -> Option<GgmlDType> {
    Some(match dtype {
        TensorType::F32 => GgmlDType::F32,
        TensorType::F16 => GgmlDType::F16,
        TensorType::Bf16 => GgmlDType::BF16,
        TensorType::Q4_0 => GgmlDType::Q4_0,
        TensorType::Q4_1 => GgmlDType::Q4_1,
        TensorType::Q5_0 => GgmlDType::Q5_0,
        TensorType::Q5_1 => GgmlDType::Q5_1,
        TensorType::Q8_0 => GgmlDType::Q8_0,
        TensorType::Q2K => GgmlDType::Q2K,
        TensorType::Q3K => GgmlDType::Q3K,
        TensorType::Q4K => GgmlDType::Q4K,
        TensorType::Q5K => GgmlDType::Q5K,
        TensorType::Q6K => GgmlDType::Q6K,
        _ => return None,
    })
}
