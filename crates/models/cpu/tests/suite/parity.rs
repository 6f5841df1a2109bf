//! Compares logits and greedy tokens with Hugging Face transformers.

use std::collections::{BTreeMap, BTreeSet};

use stolon_checkpoint::Architecture;

use super::{Open, Sizes, fixture, run};

/// What a backend computes and refuses.
#[derive(Debug, Default)]
pub(crate) struct Coverage {
    /// The names of the architectures that it computes.
    pub(crate) computed: BTreeSet<&'static str>,
    /// The names of the fixtures that it refuses, with its reasons.
    pub(crate) refused: BTreeMap<String, String>,
}

/// The logits of every fixture match those of transformers within 0.001 standard deviations, its
/// greedy tokens are the same, and the fixtures have every architecture. The backend may refuse
/// models as not supported; these are returned.
pub(crate) fn check(label: &str, open: &Open<'_>) -> Coverage {
    let mut coverage = Coverage::default();
    let mut missing: BTreeSet<_> = Architecture::all().map(Architecture::name).collect();
    for name in fixture::names() {
        let model = fixture::model(&name);
        let architecture = model.config.architecture.name();
        missing.remove(architecture);
        let mut backend = match open(model, Sizes::default()) {
            Ok(backend) => backend,
            Err(reason) => {
                assert!(reason.contains("is not supported"), "{name}, {label}: {reason}");
                coverage.refused.insert(name, reason);
                continue;
            }
        };
        coverage.computed.insert(architecture);
        let expected = fixture::expected(&name);
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
    coverage
}
