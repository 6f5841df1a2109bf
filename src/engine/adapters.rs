//! LoRA adapters.

use std::path::Path;
use std::sync::Arc;

use super::Engine;
use crate::adapters::Acquired;
use crate::{AdapterError, AdapterInfo, Error, Namespace, Request};

impl Engine {
    /// Loads a LoRA adapter, which requests choose by [`Request::adapter`]: a directory with the
    /// files of PEFT, `adapter_config.json` and `adapter_model.safetensors`, or a GGUF file.
    ///
    /// The files are read and checked on a blocking thread, while requests are computed. They are
    /// read again if the adapter has left the memory
    /// ([`EngineBuilder::adapter_memory`](crate::EngineBuilder::adapter_memory)).
    ///
    /// Requests of any number of adapters, and of the model itself, are computed in one batch. Each
    /// adapter has cached prefixes of its own.
    ///
    /// ```no_run
    /// # async fn load(engine: stolon::Engine) -> Result<(), stolon::Error> {
    /// use stolon::Request;
    ///
    /// engine.load_adapter("sql", "adapters/sql").await?;
    /// let request = Request::text("All customers of 2024:").adapter("sql").max_tokens(64);
    /// println!("{}", engine.complete(request).await?.text);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`AdapterError`]: among others `Exists` if the name is in use, and `Load` if the files are
    /// malformed, do not fit the model, or have something that is not supported.
    pub async fn load_adapter(
        &self,
        name: impl AsRef<str>,
        path: impl AsRef<Path>,
    ) -> Result<AdapterInfo, AdapterError> {
        self.inner.adapters.load(name.as_ref(), path.as_ref(), false).await
    }

    /// As [`Engine::load_adapter`]; an adapter of this name is replaced. Requests that use it end
    /// with the weights that they began with. Those that are submitted afterward use the new ones,
    /// and never read KV that the old ones have computed. If this fails, the old one stays.
    ///
    /// # Errors
    /// As [`Engine::load_adapter`], without `Exists`.
    pub async fn replace_adapter(
        &self,
        name: impl AsRef<str>,
        path: impl AsRef<Path>,
    ) -> Result<AdapterInfo, AdapterError> {
        self.inner.adapters.load(name.as_ref(), path.as_ref(), true).await
    }

    /// Unloads an adapter. Requests that use it end as if it were still loaded; its memory is
    /// released after the last one.
    ///
    /// # Errors
    /// [`AdapterError::Unknown`].
    pub fn unload_adapter(&self, name: impl AsRef<str>) -> Result<(), AdapterError> {
        self.inner.adapters.unload(name.as_ref())
    }

    /// The adapters that are loaded, in the order of their names.
    pub fn adapters(&self) -> Vec<AdapterInfo> {
        self.inner.adapters.list()
    }

    /// The adapter of this name, if it is loaded.
    pub fn adapter(&self, name: impl AsRef<str>) -> Option<AdapterInfo> {
        self.inner.adapters.info(name.as_ref())
    }

    /// Number of times that the weights of an idle adapter have left the memory to make room for
    /// others.
    pub fn adapter_evictions(&self) -> u64 {
        self.inner.adapters.evictions()
    }

    /// The name of the adapter that has computed the KV in a namespace, for programs that publish
    /// [`Cache::events`](crate::Cache::events); `None` for other namespaces, and for those that no
    /// request has used for a long time.
    pub fn adapter_of(&self, namespace: &Namespace) -> Option<Arc<str>> {
        self.inner.adapters.name_of(namespace)
    }

    /// The namespace of a request. It depends on the weights that are loaded under the name of its
    /// adapter now.
    pub(crate) fn namespace(&self, request: &Request) -> Result<Namespace, Error> {
        let name = request.adapter.as_deref();
        let generation = name.map(|name| self.inner.adapters.generation(name)).transpose()?;
        request.namespace(generation, self.inner.namespace_key)
    }

    /// Attaches the weights of its adapter to a request, which holds them until it ends, and
    /// returns its namespace.
    pub(super) async fn with_adapter(
        &self,
        mut request: Request,
    ) -> Result<(Request, Namespace), Error> {
        let mut generation = None;
        if let Some(name) = &request.adapter {
            let Acquired { weights, generation: own } = self.inner.adapters.acquire(name).await?;
            request.options.adapter = Some(weights);
            generation = Some(own);
        }
        let namespace = request.namespace(generation, self.inner.namespace_key)?;
        if let Some(name) = &request.adapter {
            self.inner.adapters.note(namespace, name);
        }
        Ok((request, namespace))
    }
}
