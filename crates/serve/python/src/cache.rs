//! The class `Cache`: the prefix cache of a running engine.

use pyo3::prelude::*;
use stolon::{PinId, Request};

use crate::engine::json;
use crate::error::Failure;
use crate::options::{read, seconds};
use crate::process::{ProcessBound, wait};
use crate::request::Spec;

/// The prefix cache of an engine. `stolon.Cache` wraps it. Requests are JSON objects.
#[pyclass(frozen, module = "stolon._native")]
#[derive(Debug)]
pub(crate) struct Cache {
    engine: ProcessBound<stolon::Engine>,
}

impl Cache {
    pub(crate) fn new(engine: ProcessBound<stolon::Engine>) -> Cache {
        Cache { engine }
    }
}

/// The request with its prompt as token ids.
async fn tokenized(engine: &stolon::Engine, spec: Spec) -> Result<Request, Failure> {
    let request = spec.prepare(engine, Vec::new()).await?;
    Ok(engine.tokenized(request).await?)
}

/// A pin: id, tokens, blocks, whether it was demoted, and the seconds that are left.
type PinRow = (u64, usize, usize, bool, Option<f64>);

#[pymethods]
impl Cache {
    /// The number of the prompt's tokens that are cached.
    fn query_match_len(&self, py: Python<'_>, request: &str) -> PyResult<usize> {
        let (engine, spec) = (self.engine.get(py)?, read::<Spec>(request)?);
        wait(py, async {
            let request = tokenized(engine, spec).await?;
            Ok::<_, Failure>(engine.cache().query_match_len(&request)?)
        })
    }

    /// Computes a prompt. Returns its length in tokens.
    fn warm(&self, py: Python<'_>, request: &str) -> PyResult<usize> {
        let (engine, spec) = (self.engine.get(py)?, read::<Spec>(request)?);
        wait(py, async {
            let request = tokenized(engine, spec).await?;
            Ok::<_, Failure>(engine.cache().warm(request).await?)
        })
    }

    /// Why a part of the prompt is not cached, as JSON.
    fn explain(&self, py: Python<'_>, request: &str) -> PyResult<Option<String>> {
        let (engine, spec) = (self.engine.get(py)?, read::<Spec>(request)?);
        let miss = wait(py, async {
            let request = spec.prepare(engine, Vec::new()).await?;
            Ok::<_, Failure>(engine.cache().explain(&request).await?)
        })?;
        miss.map(|miss| json(py, &miss)).transpose()
    }

    /// Protects the cached prefix of the prompt from eviction, for `ttl` seconds or until it is
    /// unpinned. Returns the number of the pin.
    fn pin(&self, py: Python<'_>, request: &str, ttl: Option<f64>) -> PyResult<u64> {
        let (engine, spec) = (self.engine.get(py)?, read::<Spec>(request)?);
        let ttl = ttl.map(|ttl| seconds("ttl", ttl)).transpose()?;
        let id = wait(py, async {
            let request = tokenized(engine, spec).await?;
            Ok::<_, Failure>(engine.cache().pin(&request, ttl).await?)
        })?;
        Ok(id.0)
    }

    /// Ends a pin. Returns whether it existed.
    fn unpin(&self, py: Python<'_>, id: u64) -> PyResult<bool> {
        wait(py, self.engine.get(py)?.cache().unpin(PinId(id)))
    }

    /// All pins, oldest first.
    fn pins(&self, py: Python<'_>) -> PyResult<Vec<PinRow>> {
        let pins = wait(py, self.engine.get(py)?.cache().pins())?;
        let row = |pin: stolon::Pin| {
            let left = pin.ends_in.map(|time| time.as_secs_f64());
            (pin.id.0, pin.tokens, pin.blocks, pin.demoted, left)
        };
        Ok(pins.into_iter().map(row).collect())
    }

    /// Removes what starts with the prompt. Returns the number of freed blocks.
    fn evict_prefix(&self, py: Python<'_>, request: &str) -> PyResult<usize> {
        let (engine, spec) = (self.engine.get(py)?, read::<Spec>(request)?);
        wait(py, async {
            let request = tokenized(engine, spec).await?;
            Ok::<_, Failure>(engine.cache().evict_prefix(&request).await?)
        })
    }

    /// Empties the cache.
    fn flush(&self, py: Python<'_>) -> PyResult<()> {
        wait(py, self.engine.get(py)?.cache().flush())
    }

    /// Statistics, as JSON.
    fn stats(&self, py: Python<'_>) -> PyResult<String> {
        let stats = wait(py, self.engine.get(py)?.cache().stats())?;
        json(py, &stats)
    }
}
