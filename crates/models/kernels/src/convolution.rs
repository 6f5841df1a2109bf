//! Short causal convolutions: each channel is a weighted sum of the last positions of a sequence.
#![allow(unsafe_code, reason = "runs on SIMD lanes, whose methods are unsafe")]

mod rows;

use crate::attention::args::KvSlice;
use crate::attention::tile_loading::load_live;
use crate::gemm::{Bf16, F16, F32, Form, SingleForm};
use crate::lanes::{LANES, Lanes, dispatch, load_some, store_some};
use crate::path::Path;

pub use rows::convolution_silu;

/// Computes one row of a convolution with a gate: `out[c] = gate[c] * sum of taps[t][c] *
/// inputs[slots[t]][c]` over the taps `t` in ascending order.
///
/// `inputs` has the shape `[slots, out.len()]`, and `taps` the shape `[slots.len(), out.len()]`.
/// `None` is a position before the start of the sequence, whose inputs are zero.
/// Serial; the result depends on nothing but these values.
///
/// # Panics
/// If the lengths do not match, if a slot is outside of `inputs`, or if `inputs` have scales.
pub fn convolution(
    path: Path,
    inputs: KvSlice<'_>,
    slots: &[Option<usize>],
    taps: &[f32],
    gate: &[f32],
    out: &mut [f32],
) {
    let width = out.len();
    assert_eq!(gate.len(), width, "convolution: one gate for each value");
    assert_eq!(taps.len(), slots.len() * width, "convolution: one weight for each tap and value");
    let available = inputs.len() / width.max(1);
    let within = slots.iter().flatten().all(|slot| *slot < available);
    assert!(within, "convolution: expected slots below {available}, got {slots:?}");
    let row = Row { slots, taps, gate, out };
    // SAFETY: the lengths were checked above.
    unsafe {
        match inputs {
            KvSlice::F32(inputs) => f32_dispatch(path, inputs, row),
            KvSlice::Bf16(inputs) => bf16_dispatch(path, inputs, row),
            KvSlice::F16(inputs) => f16_dispatch(path, inputs, row),
            KvSlice::Int8 { .. } | KvSlice::Int4 { .. } => {
                panic!("convolution: inputs are never stored with scales")
            }
        }
    }
}

/// The arguments for one row, apart from the stored inputs.
struct Row<'a> {
    slots: &'a [Option<usize>],
    /// `[slots.len(), out.len()]`.
    taps: &'a [f32],
    /// `[out.len()]`.
    gate: &'a [f32],
    out: &'a mut [f32],
}

/// Computes `row` from inputs in the form `F`.
///
/// # Safety
/// The instruction set of `L` is available. The slices of `row` have the documented lengths, and
/// each of its slots is a row of `row.out.len()` values in `inputs`.
#[inline(always)]
unsafe fn convolve<L: Lanes, F: SingleForm>(inputs: &[F::Raw], row: Row<'_>) {
    let Row { slots, taps, gate, out } = row;
    let width = out.len();
    for at in (0..width).step_by(LANES) {
        let left = width - at;
        // SAFETY: each slot, each tap, `gate` and `out` have `width` values, of which `left` are at
        // `at` and after it. No more than `left` are read or written.
        unsafe {
            let mut sum = L::splat(0.0);
            for (tap, slot) in slots.iter().enumerate() {
                let Some(slot) = slot else { continue };
                let value = load_live::<L, F>(inputs.as_ptr().add(slot * width + at), left);
                let weight = load_some::<L>(taps.as_ptr().add(tap * width + at), left, 0.0);
                sum = value.mul_add(weight, sum);
            }
            let gate = load_some::<L>(gate.as_ptr().add(at), left, 0.0);
            store_some(gate.mul(sum), out.as_mut_ptr().add(at), left);
        }
    }
}

/// Defines the dispatcher for one form of inputs.
macro_rules! of_form {
    ($dispatch:ident, $body:ident, $form:ty) => {
        /// # Safety
        /// The conditions of [`convolve`].
        #[inline(always)]
        unsafe fn $body<L: Lanes>(inputs: &[<$form as Form>::Raw], row: Row<'_>) {
            // SAFETY: the conditions are the same.
            unsafe { convolve::<L, $form>(inputs, row) }
        }
        dispatch! {
            /// # Safety
            /// The slices of `row` have the documented lengths, and each of its slots is a row of
            /// `row.out.len()` values in `inputs`.
            unsafe fn $dispatch(inputs: &[<$form as Form>::Raw], row: Row<'_>) = $body
        }
    };
}
of_form!(f32_dispatch, f32_row, F32);
of_form!(bf16_dispatch, bf16_row, Bf16);
of_form!(f16_dispatch, f16_row, F16);

#[cfg(test)]
mod tests {
    use half::{bf16, f16};

    use super::*;

    /// Goal: on every instruction set and for every stored type, at widths with and without whole
    /// vectors, a row is the documented sum; positions before the start count as zero.
    #[test]
    fn a_row_is_the_gated_sum_of_its_taps() {
        for width in [1, 15, 16, 48, 53] {
            let input = |slot: usize, channel: usize| ((slot * 31 + channel * 7) as f32).sin();
            let stored: Vec<f32> = (0..5)
                .flat_map(|slot| (0..width).map(move |c| (slot, c)))
                .map(|(s, c)| input(s, c))
                .collect();
            let bf16s: Vec<u16> = stored.iter().map(|v| bf16::from_f32(*v).to_bits()).collect();
            let f16s: Vec<u16> = stored.iter().map(|v| f16::from_f32(*v).to_bits()).collect();
            let taps: Vec<f32> = (0..3 * width).map(|i| (i as f32 * 0.3).cos()).collect();
            let gate: Vec<f32> = (0..width).map(|i| 1.0 + i as f32 * 0.1).collect();
            for path in Path::supported() {
                for (inputs, error) in [
                    (KvSlice::F32(&stored), 1e-5),
                    (KvSlice::Bf16(&bf16s), 0.1),
                    (KvSlice::F16(&f16s), 0.01),
                ] {
                    let mut out = vec![f32::NAN; width];
                    convolution(path, inputs, &[None, Some(4), Some(1)], &taps, &gate, &mut out);
                    for (c, got) in out.iter().enumerate() {
                        let sum = taps[width + c] * input(4, c) + taps[2 * width + c] * input(1, c);
                        let want = gate[c] * sum;
                        assert!((got - want).abs() <= error * gate[c], "{path:?} {width} {c}");
                    }
                }
            }
        }
    }

    /// Goal: a slot outside of the store panics instead of reading other memory.
    #[test]
    #[should_panic(expected = "expected slots below 2")]
    fn a_slot_outside_of_the_store_panics() {
        let mut out = [0.0; 3];
        let inputs = KvSlice::F32(&[0.0; 6]);
        convolution(Path::PORTABLE, inputs, &[Some(2)], &[1.0; 3], &[1.0; 3], &mut out);
    }
}
