//! Models with random weights and the shapes of real models, for benchmarks and tests.
//!
//! The values depend only on the seed and on the tensor's name, shape and type, not on the machine
//! or the number of threads.

mod normal;
mod preset;
mod vision;

use std::borrow::Cow;

use half::{bf16, f16};
use rand::{RngCore, SeedableRng};
use rand_chacha::ChaCha8Rng;
use stolon_text::{TextSource, TokenizerSource};

use preset::Preset;
pub use preset::{PRESETS, preset};

use crate::config::{DecoderConfig, TensorRole, TensorSpec, VisionConfig};
use crate::error::ModelError;
use crate::load::TextPrompts;
use crate::load::model::{GenerationDefaults, LoadedModel};
use crate::memory::check_free;
use crate::weights::{Tensor, TensorType, Weights};

/// Standard deviation of all weights, as in the usual initialization before training.
const DEVIATION: f32 = 0.02;

/// Creates a model with the shape of the preset `name`. Its tokens are bytes and, if it reads
/// images, the tokens that mark images.
pub(crate) fn load(name: &str, seed: u64) -> Result<LoadedModel, ModelError> {
    let Preset { decoder: config, images, skills } = preset::with_images(name)?;
    let weights = random_weights(&config, images.as_ref().map(|images| &images.encoder), seed)?;
    let (tokenizer, chat_template) = match &images {
        None => (TokenizerSource::Bytes { vocab_size: config.vocab_size }, None),
        Some(images) => {
            let prompts = vision::Prompts::of(&images.processor.tiling);
            let bytes = prompts.tokenizer().to_string().into_bytes().into();
            // Models with skills have their own prompts.
            let template = skills.is_none().then(|| prompts.template.to_owned());
            (TokenizerSource::Json { file: format!("random:{name}"), bytes }, template)
        }
    };
    Ok(LoadedModel {
        id: format!("random:{name}"),
        config,
        weights,
        text: TextSource {
            tokenizer,
            tokenizer_config: None,
            chat_template,
            named_templates: Vec::new(),
        },
        // Sampling is off, because tests and benchmarks need the same answer every time.
        generation: GenerationDefaults { do_sample: Some(false), ..GenerationDefaults::default() },
        embedding: None,
        prompts: TextPrompts::default(),
        tasks: Vec::new(),
        scores: None,
        generates: true,
        images,
        skills,
        has_mtp: false,
        mtp: None,
    })
}

/// Creates random weights for `config` with the element type `config.dtype`. All weights are
/// normally distributed with standard deviation 0.02. The mean is 0 for matrices and biases. For
/// norms it is one minus the offset, so that they scale by about 1. Uses all cores.
///
/// # Errors
/// [`ModelError::Unsupported`] if `config.dtype` is a quantized type, the errors of
/// [`DecoderConfig::check`], and [`ModelError::OutOfMemory`].
///
/// # Panics
/// If a thread cannot be started.
pub fn random_model(config: &DecoderConfig, seed: u64) -> Result<Weights, ModelError> {
    random_weights(config, None, seed)
}

/// The same as [`random_model`], with the weights of an image encoder.
fn random_weights(
    config: &DecoderConfig,
    encoder: Option<&VisionConfig>,
    seed: u64,
) -> Result<Weights, ModelError> {
    const NAME: &str = "random model";
    if config.dtype.block_len() != 1 {
        let got = config.dtype.name();
        return Err(ModelError::unsupported(NAME, "dtype", "F32, F16 or BF16", got));
    }
    config.check(NAME)?;
    let mut specs = config.tensors();
    specs.extend(encoder.iter().flat_map(|encoder| encoder.tensors()));
    let bytes = |spec: &TensorSpec| {
        let elements = spec.shape.iter().try_fold(1_usize, |n, d| n.checked_mul(*d));
        elements.and_then(|n| config.dtype.bytes_of(n)).map_or(u64::MAX, |n| n as u64)
    };
    check_free(NAME, specs.iter().map(bytes).fold(0, u64::saturating_add))?;
    let quantiles = normal::quantiles();
    let [matrices, norms, plain_norms] = [0.0, 1.0 - config.norms.offset, 1.0]
        .map(|mean| Values::new(&quantiles, mean, config.dtype));
    let fill = |spec: &TensorSpec| {
        let values = match spec.role {
            TensorRole::Norm => &norms,
            TensorRole::PlainNorm => &plain_norms,
            _ => &matrices,
        };
        Tensor {
            name: spec.name.clone(),
            dtype: config.dtype,
            shape: spec.shape.clone(),
            bytes: Cow::Owned(values.fill(spec, seed)),
        }
    };
    let workers = std::thread::available_parallelism().map_or(1, usize::from).min(specs.len());
    let (specs, fill) = (&specs, &fill);
    let tensors: Vec<Tensor<'static>> = std::thread::scope(|scope| {
        let work = |first| move || specs.iter().skip(first).step_by(workers).map(fill).collect();
        let threads: Vec<_> = (0..workers).map(|first| scope.spawn(work(first))).collect();
        threads
            .into_iter()
            .flat_map(|thread| -> Vec<_> {
                thread.join().expect("filling a tensor does not panic")
            })
            .collect()
    });
    Weights::from_tensors(NAME, tensors)
}

/// The values that tensors are filled with: a table of 65,536 equally likely values, as stored
/// bytes.
struct Values {
    table: Vec<u8>,
    /// Size of one value in bytes.
    width: usize,
}

impl Values {
    fn new(quantiles: &[f32], mean: f32, dtype: TensorType) -> Self {
        let mut table = Vec::with_capacity(quantiles.len() * dtype.block_bytes());
        for quantile in quantiles {
            let value = mean + DEVIATION * quantile;
            match dtype {
                TensorType::F16 => table.extend_from_slice(&f16::from_f32(value).to_le_bytes()),
                TensorType::Bf16 => table.extend_from_slice(&bf16::from_f32(value).to_le_bytes()),
                _ => table.extend_from_slice(&value.to_le_bytes()),
            }
        }
        Self { table, width: dtype.block_bytes() }
    }

    /// The bytes of one tensor. Each value is chosen by 16 random bits.
    fn fill(&self, spec: &TensorSpec, seed: u64) -> Vec<u8> {
        let mut random = ChaCha8Rng::seed_from_u64(seed ^ name_hash(&spec.name));
        let elements: usize = spec.shape.iter().product();
        let mut bytes = Vec::with_capacity(elements * self.width);
        let mut chosen = [0; 4096];
        while bytes.len() < elements * self.width {
            let left = elements - bytes.len() / self.width;
            let chosen = &mut chosen[..(2 * left).min(4096)];
            random.fill_bytes(chosen);
            for index in chosen.chunks_exact(2) {
                let start = usize::from(u16::from_le_bytes([index[0], index[1]])) * self.width;
                bytes.extend_from_slice(&self.table[start..start + self.width]);
            }
        }
        bytes
    }
}

/// The FNV-1a hash of a name. Unlike the standard library's hash, it never changes.
fn name_hash(name: &str) -> u64 {
    name.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

#[cfg(test)]
mod tests;
