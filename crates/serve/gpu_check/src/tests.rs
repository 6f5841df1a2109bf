//! Tests the checks with backends that compute something wrong: each must be noticed.

use std::collections::HashSet;

use stolon::Backend;
use stolon::backend::{AdapterLoader, BackendError, BackendSpec, BlockId, StepBatch, StepOutput};
use stolon_checkpoint::config::Architecture;
use stolon_checkpoint::{DecoderConfig, Weights};
use stolon_cuda::{CandleBackend, CandleOptions, OpenError};

use super::*;

/// The fault of a backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    /// Nothing.
    None,
    /// The last logit of each row is a little too large.
    Logits,
    /// The same, but only in steps with more than one sequence, and by the last bit.
    Batches,
    /// It draws the tokens before the right ones.
    Draws,
    /// Keys and values are not written to blocks that have been written before.
    SecondWrite,
    /// With CUDA graphs, decode steps write keys and values of another token.
    GraphWrites,
    /// Adapters are ignored.
    Adapters,
    /// It panics.
    Panic,
}

/// Opens backends with a fault.
#[derive(Clone, Copy, Debug)]
struct Faulty(Fault);

struct FaultyBackend {
    inner: CandleBackend,
    fault: Fault,
    written: HashSet<BlockId>,
    cuda_graphs: bool,
}

impl Target for Faulty {
    type Backend = FaultyBackend;

    fn open(
        &self,
        config: DecoderConfig,
        weights: Weights,
        options: CandleOptions,
    ) -> Result<FaultyBackend, OpenError> {
        let cuda_graphs = options.cuda_graphs;
        let inner = CandleBackend::open(config, weights, options)?;
        Ok(FaultyBackend { inner, fault: self.0, written: HashSet::new(), cuda_graphs })
    }

    fn captured_graphs(backend: &FaultyBackend) -> usize {
        backend.inner.captured_graphs()
    }
}

impl Backend for FaultyBackend {
    fn spec(&self) -> &BackendSpec {
        self.inner.spec()
    }

    fn adapters(&self) -> Option<std::sync::Arc<dyn AdapterLoader>> {
        self.inner.adapters()
    }

    fn step(&mut self, batch: &StepBatch) -> Result<StepOutput, BackendError> {
        assert_ne!(self.fault, Fault::Panic, "a fault");
        let mut batch = batch.clone();
        if self.fault == Fault::Adapters {
            batch.sequences.iter_mut().for_each(|slice| slice.adapter = None);
        }
        if self.fault == Fault::SecondWrite {
            for slice in &mut batch.sequences {
                let end = slice.start + slice.token_count;
                let first = slice.write_from / 32;
                let written = &slice.block_table[first.min(slice.block_table.len())..];
                // Only the first position of a block decides, because later positions are written
                // one by one.
                if slice.write_from % 32 == 0 && written.iter().any(|b| self.written.contains(b)) {
                    slice.write_from = end;
                }
                self.written.extend(written);
            }
        }
        let mut output = self.inner.step(&batch)?;
        if self.fault == Fault::GraphWrites && self.cuda_graphs && !output.drawn.is_empty() {
            let mut other = StepBatch { tokens: vec![0], sequences: batch.sequences[..1].to_vec() };
            other.tokens[0] = batch.tokens[0] ^ 1;
            self.inner.step(&other)?;
        }
        let vocab_size = self.inner.spec().vocab_size;
        for row in output.logits.chunks_exact_mut(vocab_size) {
            let last = &mut row[vocab_size - 1];
            match self.fault {
                Fault::Logits => *last += 0.3,
                Fault::Batches if batch.sequences.len() > 1 => {
                    *last = f32::from_bits(last.to_bits() ^ 1);
                }
                _ => {}
            }
        }
        if self.fault == Fault::Draws {
            output.drawn.iter_mut().flatten().for_each(|token| *token = token.saturating_sub(1));
        }
        Ok(output)
    }
}

/// The report of one check of the Llama model on the CPU in f32.
async fn report(fault: Fault, kind: Kind, batch_invariant: bool) -> Check {
    let subjects = subject::architectures().expect("valid configurations");
    let setup = Setup::new(DeviceChoice::Cpu, Some(ComputeType::F32));
    let setup = Setup { batch_invariant, cuda_graphs: kind == Kind::CudaGraphs, ..setup };
    let mut report = Report::new("cpu".to_owned(), |_| Ok(()));
    one(&Faulty(fault), kind, &subjects[0], setup, &mut report).await.expect("a line is printed");
    report.checks.remove(0)
}

/// Goal: a backend without faults passes every check; each fault makes the check that looks for it
/// fail, with a reason; and a panic fails one check only.
#[tokio::test(flavor = "multi_thread")]
async fn every_fault_is_noticed() {
    for (fault, kind, batch_invariant, expected) in [
        (Fault::None, Kind::CpuParity, true, true),
        (Fault::None, Kind::WarmEqualsCold, true, true),
        (Fault::None, Kind::WarmEqualsCold, false, true),
        (Fault::None, Kind::BlocksReused, true, true),
        (Fault::Logits, Kind::CpuParity, true, false),
        (Fault::Draws, Kind::CpuParity, true, false),
        (Fault::Batches, Kind::WarmEqualsCold, true, false),
        // One bit is within the tolerance.
        (Fault::Batches, Kind::WarmEqualsCold, false, true),
        (Fault::SecondWrite, Kind::BlocksReused, true, false),
        // Split-KV decoding can be captured on the CPU, too.
        (Fault::None, Kind::CudaGraphs, false, true),
        (Fault::GraphWrites, Kind::CudaGraphs, false, false),
        (Fault::None, Kind::Adapters, true, true),
        (Fault::Adapters, Kind::Adapters, true, false),
        (Fault::Batches, Kind::Adapters, true, false),
        (Fault::Panic, Kind::CpuParity, true, false),
        (Fault::Panic, Kind::BlocksReused, true, false),
    ] {
        let check = report(fault, kind, batch_invariant).await;
        assert_eq!(check.passed, expected, "{fault:?}, {check:?}");
        assert_eq!(check.kind, kind.name());
        assert!(!check.detail.is_empty() && check.seconds > 0.0);
    }
    let panicked = report(Fault::Panic, Kind::CpuParity, true).await;
    assert!(panicked.detail.contains("a fault") && panicked.value.is_none(), "{panicked:?}");
}

/// Goal: models with quantized weights pass on the CPU: a third of them, because `.ci/deep` runs
/// all.
#[tokio::test(flavor = "multi_thread")]
async fn quantized_models_are_computed() {
    for subject in subject::quantized().expect("valid configurations").iter().step_by(3) {
        let setup = Setup::new(DeviceChoice::Cpu, None);
        for kind in [Kind::CpuParity, Kind::WarmEqualsCold] {
            let mut report = Report::new("cpu".to_owned(), |_| Ok(()));
            one(&Candle, kind, subject, setup, &mut report).await.expect("a line is printed");
            let check = &report.checks[0];
            assert!(check.passed && check.model == subject.name, "{check:?}");
        }
    }
}

/// Goal: models with keys and values in int8 pass on the CPU, and are not taken for those without.
#[tokio::test(flavor = "multi_thread")]
async fn int8_models_are_computed() {
    let subjects = subject::architectures().expect("valid configurations");
    let cpu = DeviceChoice::Cpu;
    let mut checked = 0;
    for subject in subjects.iter().filter(|subject| has_int8(cpu, &subject.name)) {
        let setup = Setup { kv_type: Some(KvType::Int8), ..Setup::new(cpu, None) };
        for kind in [Kind::CpuParity, Kind::WarmEqualsCold] {
            let mut report = Report::new("cpu".to_owned(), |_| Ok(()));
            one(&Candle, kind, subject, setup, &mut report).await.expect("a line is printed");
            let check = &report.checks[0];
            assert!(check.passed && check.line().contains("KV in int8"), "{check:?}");
        }
        checked += 1;
    }
    assert_eq!(checked, INT8.len(), "a name is unknown");
}

/// Goal: there is a model of every architecture, with all of its tensors.
#[test]
fn every_architecture_has_a_model() {
    let subjects = subject::architectures().expect("valid configurations");
    let mut architectures = HashSet::new();
    for subject in subjects {
        let (config, weights) = subject.load().expect("random weights");
        weights.check(&config).expect("all tensors");
        architectures.insert(config.architecture);
    }
    assert_eq!(architectures, Architecture::all().collect());
}
