//! Images that requests name by the URL of a server.

use std::sync::Arc;

use futures::future::BoxFuture;
use futures::{FutureExt, StreamExt, TryStreamExt};

use super::Images;
use crate::request::{ImageFile, Prompt, url_of};
use crate::{ChatMessage, EngineBuilder, Error, MessageContent, Request};

/// Maximum number of images of a request that are fetched at the same time.
const CONCURRENT_MAX: usize = 4;

type Fetching = BoxFuture<'static, Result<Vec<u8>, String>>;

/// The program's function that fetches images, if it has set one.
#[derive(Clone, Default)]
pub(crate) struct Fetch(Option<Arc<dyn Fn(Arc<str>) -> Fetching + Send + Sync>>);

impl std::fmt::Debug for Fetch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Fetch").field(&self.0.is_some()).finish()
    }
}

impl Fetch {
    pub(crate) fn is_set(&self) -> bool {
        self.0.is_some()
    }
}

impl EngineBuilder {
    /// Sets the function that returns the file at an image's URL, for URLs that are not data URLs,
    /// or says why it does not. Default: all such URLs are refused. Not for a custom backend.
    ///
    /// Clients choose the URLs, and the function decides which servers may be asked. One that
    /// fetches every URL lets clients reach servers that only this machine can reach, also by a
    /// redirect or by a name with a private address. The function also bounds the time and the size
    /// of the file. `ImageHosts` of `stolon-http` does all of it, for a list of hosts.
    ///
    /// It is called in the task that submits the request, at most four times at once for each.
    pub fn image_urls<F, Fut>(mut self, fetch: F) -> Self
    where
        F: Fn(Arc<str>) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<Vec<u8>, String>> + Send + 'static,
    {
        self.fetch = Fetch(Some(Arc::new(move |url| fetch(url).boxed())));
        self
    }
}

impl Images {
    /// The same with the program's function for URLs.
    pub(crate) fn with(mut self, fetch: Fetch) -> Images {
        self.fetch = fetch;
        self
    }

    /// The request with the files of images that it names by other URLs than data URLs. Without a
    /// function for them, the URLs stay, and are refused where images are decoded.
    pub(crate) async fn fetched(&self, request: Request) -> Result<Request, Error> {
        let Some(fetch) = self.fetch.0.as_ref().filter(|_| has_remote(&request)) else {
            return Ok(request);
        };
        let mut request = self.collect(request)?;
        let files = std::mem::take(&mut request.images).into_iter().enumerate();
        let files = files.map(|(index, file)| async move {
            match file {
                ImageFile::Url(url) if is_remote(&url) => {
                    let refused = |reason| Error::Image { number: index + 1, reason };
                    fetch(url).await.map(|file| ImageFile::Bytes(file.into())).map_err(refused)
                }
                file => Ok(file),
            }
        });
        request.images =
            futures::stream::iter(files).buffered(CONCURRENT_MAX).try_collect().await?;
        Ok(request)
    }
}

fn is_remote(url: &str) -> bool {
    !url.starts_with("data:")
}

/// Whether a request names an image by another URL than a data URL.
fn has_remote(request: &Request) -> bool {
    let of_message = |message: &ChatMessage| match &message.content {
        Some(MessageContent::Parts(parts)) => parts.iter().filter_map(url_of).any(is_remote),
        _ => false,
    };
    let in_messages =
        matches!(request.prompt(), Prompt::Chat(messages) if messages.iter().any(of_message));
    let of_file = |file: &ImageFile| matches!(file, ImageFile::Url(url) if is_remote(url));
    in_messages || request.images.iter().any(of_file)
}
