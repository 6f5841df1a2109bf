//! What a model that is unloaded leaves for its next engine, in addition to the KV in its disk tier.

use std::path::PathBuf;
use std::time::Instant;

use stolon_scheduler::SavedSession;

use crate::text::Remembered;
use crate::{AdapterInfo, Engine, EngineBuilder};

/// The sessions, adapters and history of an engine.
#[derive(Clone, Debug, Default)]
pub(super) struct Carried {
    sessions: Vec<SavedSession>,
    /// The names of the adapters, and the paths that they were loaded from.
    adapters: Vec<(String, PathBuf)>,
    history: Option<Remembered>,
}

impl Carried {
    pub(super) fn of(engine: &Engine) -> Carried {
        let adapters = engine.adapters().into_iter();
        Carried {
            sessions: engine.inner.handle.context().sessions.save(Instant::now()),
            adapters: adapters.map(|AdapterInfo { name, path, .. }| (name, path)).collect(),
            history: engine.inner.prompts.text.remembered(),
        }
    }

    pub(super) fn adapter_names(&self) -> Vec<String> {
        self.adapters.iter().map(|(name, _)| name.clone()).collect()
    }

    /// The builder of an engine that continues the history.
    pub(super) fn continued(&self, mut builder: EngineBuilder) -> EngineBuilder {
        builder.remembered = self.history.clone();
        builder
    }

    /// Opens the sessions again, and loads the adapters that the engine was not built with. An
    /// adapter that cannot be loaded is left out.
    pub(super) async fn restore(self, engine: &Engine) {
        for (name, path) in self.adapters {
            if engine.adapter(&name).is_some() {
                continue;
            }
            if let Err(error) = engine.load_adapter(&name, &path).await {
                tracing::warn!(name, %error, "an adapter was not loaded again");
            }
        }
        engine.inner.handle.context().sessions.restore(self.sessions, Instant::now());
    }
}
