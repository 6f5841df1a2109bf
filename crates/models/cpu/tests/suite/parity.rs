//! Compares logits and greedy tokens with Hugging Face transformers.

use std::collections::BTreeSet;

use stolon_checkpoint::{Architecture, DecoderConfig};

use super::{Open, Sizes, fixture, run};

/// The logits of every fixture match those of transformers within 0.001 standard deviations, its
/// greedy tokens are the same, and the fixtures have every architecture. The backend refuses
/// configurations for which `computes` is false.
pub(crate) fn check(label: &str, open: &Open<'_>, computes: fn(&DecoderConfig) -> bool) {
    let mut missing: BTreeSet<_> = Architecture::all().map(Architecture::name).collect();
    for name in fixture::names() {
        let model = fixture::model(&name);
        let architecture = model.config.architecture;
        missing.remove(architecture.name());
        if !computes(&model.config) {
            let error = open(model, Sizes::default()).err().expect("an error");
            assert!(error.contains("is not supported"), "{name}, {label}: {error}");
            continue;
        }
        let expected = fixture::expected(&name);
        let mut backend = open(model, Sizes::default()).expect("a valid model");
        let table = run::table(5, expected.prompt.len(), Sizes::default().block_size);
        let rows = run::rows(&mut *backend, &expected.prompt, 0, usize::MAX / 2, &table);
        assert_eq!(rows.len(), expected.prompt.len());
        for (&row, logits) in expected.rows.iter().zip(&expected.logits) {
            let difference = fixture::difference(&rows[row], logits);
            assert!(
                difference < 1e-3,
                "{name}, {label}, row {row}: {difference} standard deviations"
            );
        }
        let greedy = run::greedy(&mut *backend, &expected.prompt, expected.greedy.len());
        assert_eq!(greedy, expected.greedy, "{name}, {label}");
    }
    assert!(missing.is_empty(), "no fixture has the architectures {missing:?}");
}
