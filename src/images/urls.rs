//! Images that requests name by the URL of a server.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use futures::{FutureExt, StreamExt};
use tokio::time::Instant;

use super::Images;
use super::processor::data_of;
use crate::long_work::{FairLane, Slot};
use crate::request::{ImageFile, Prompt, url_of};
use crate::{ChatMessage, EngineBuilder, Error, MessageContent, Request};

/// Maximum number of images of a request that are fetched at the same time.
const CONCURRENT_MAX: usize = 4;
/// Maximum size in bytes of all files that are fetched for a request, checked after each file.
const BYTES_MAX: usize = 64 << 20;
/// Maximum number of requests that fetch files, or hold files that are not decoded yet.
const REQUESTS_MAX: usize = 8;
/// Number of them that may be of one client, so that its slow hosts do not keep others waiting.
const REQUESTS_OF_CLIENT_MAX: usize = 2;
/// Time within which all files of a request have to arrive.
const TIME_MAX: Duration = Duration::from_secs(20);

type Fetching = BoxFuture<'static, Result<Vec<u8>, String>>;

/// The program's function that fetches images, if it has set one.
#[derive(Clone, Default)]
pub(crate) struct Fetch(Option<Arc<Fetcher>>);

struct Fetcher {
    function: Box<dyn Fn(Arc<str>) -> Fetching + Send + Sync>,
    /// Bounds the memory for fetched files: a request has a slot until its images are decoded.
    lane: Arc<FairLane>,
}

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
    /// Sets the function that fetches the file at an image's URL, for URLs that are not data URLs,
    /// or returns the reason why it does not. Default: all such URLs are refused. Not for a custom
    /// backend.
    ///
    /// Clients choose the URLs, and the function decides which servers may be asked. One that
    /// fetches every URL lets clients reach servers that only this machine can reach, also by a
    /// redirect or by a name with a private address. The function also bounds the time and the size
    /// of the file. `ImageHosts` of `stolon-http` does all of it, for a list of hosts.
    ///
    /// It is called in the task that submits the request, once for each of its URLs and at most
    /// four times at once. The files of a request may have 64 MiB together, and have to arrive
    /// within 20 seconds; then, and if the request is dropped, the futures are dropped. At most 8
    /// requests fetch files, or have some that are not decoded yet, at most 2 of them of one client
    /// ([`Request::tenant`]); others wait.
    pub fn image_urls<F, Fut>(mut self, fetch: F) -> Self
    where
        F: Fn(Arc<str>) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<Vec<u8>, String>> + Send + 'static,
    {
        let function = Box::new(move |url| fetch(url).boxed());
        let lane = FairLane::new(REQUESTS_MAX, REQUESTS_OF_CLIENT_MAX);
        self.fetch = Fetch(Some(Arc::new(Fetcher { function, lane })));
        self
    }
}

impl Images {
    /// The same with the program's function for URLs.
    pub(crate) fn with(mut self, fetch: Fetch) -> Images {
        self.fetch = fetch;
        self
    }

    /// The request with the files of images that it names by other URLs than data URLs, and the
    /// slot to keep until they are decoded. Without a function for them, the URLs stay, and are
    /// refused where images are decoded.
    pub(crate) async fn fetched(&self, request: Request) -> Result<(Request, Option<Slot>), Error> {
        let Some(fetcher) = self.fetch.0.as_ref().filter(|_| has_remote(&request)) else {
            return Ok((request, None));
        };
        let mut request = self.collect(request)?;
        self.check(&request.images)?;
        let slot = fetcher.lane.slot(request.options.tenant.clone()).await;
        let files = fetcher.files(&request.images).await?;
        for image in &mut request.images {
            let file = remote_url(image).and_then(|url| files.get(url));
            if let Some(file) = file {
                *image = ImageFile::Bytes(Arc::clone(file));
            }
        }
        Ok((request, Some(slot)))
    }
}

impl Fetcher {
    /// The files of all images with other URLs than data URLs, by their URLs.
    async fn files(&self, images: &[ImageFile]) -> Result<HashMap<Arc<str>, Arc<[u8]>>, Error> {
        let mut urls: Vec<(usize, Arc<str>)> = Vec::new();
        for (index, image) in images.iter().enumerate() {
            let url = remote_url(image).filter(|url| urls.iter().all(|(_, other)| other != *url));
            urls.extend(url.map(|url| (index + 1, Arc::clone(url))));
        }
        let fetching = urls.clone().into_iter().map(|(_, url)| (self.function)(url));
        let mut fetched = futures::stream::iter(fetching).buffered(CONCURRENT_MAX);
        let end = Instant::now() + TIME_MAX;
        let (mut files, mut bytes) = (HashMap::new(), 0);
        for (number, url) in &urls {
            let refused = |reason| Error::Image { number: *number, reason };
            let late = || {
                let got = format!("got {} of {} in time", files.len(), urls.len());
                format!("expected all files of the request within {TIME_MAX:?}, {got}")
            };
            let file = tokio::time::timeout_at(end, fetched.next()).await;
            let Some(file) = file.map_err(|_| refused(late()))? else { break };
            let file = file.map_err(refused)?;
            bytes += file.len();
            if bytes > BYTES_MAX {
                let expected = format!("expected at most {BYTES_MAX} bytes of fetched files");
                return Err(refused(format!(
                    "{expected} in a request, got {bytes} up to this one"
                )));
            }
            files.insert(Arc::clone(url), file.into());
        }
        Ok(files)
    }
}

/// The URL of an image, if it is not a data URL.
fn remote_url(image: &ImageFile) -> Option<&Arc<str>> {
    match image {
        ImageFile::Url(url) if is_remote(url) => Some(url),
        _ => None,
    }
}

fn is_remote(url: &str) -> bool {
    data_of(url).is_none()
}

/// Whether a request names an image by another URL than a data URL.
fn has_remote(request: &Request) -> bool {
    let of_message = |message: &ChatMessage| match &message.content {
        Some(MessageContent::Parts(parts)) => parts.iter().filter_map(url_of).any(is_remote),
        _ => false,
    };
    let in_messages =
        matches!(request.prompt(), Prompt::Chat(messages) if messages.iter().any(of_message));
    in_messages || request.images.iter().any(|image| remote_url(image).is_some())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: all files of a request have to arrive within one time, however many they are and
    /// however slowly each of them comes. The error names the first that is missing, and all
    /// fetches stop.
    #[tokio::test(start_paused = true)]
    async fn all_files_arrive_within_one_time() {
        let fetching = Arc::new(());
        let fetcher = |seconds: u64| {
            let held = Arc::clone(&fetching);
            let function = move |_| {
                let held = Arc::clone(&held);
                async move {
                    tokio::time::sleep(Duration::from_secs(seconds)).await;
                    drop(held);
                    Ok(vec![1])
                }
                .boxed()
            };
            Fetcher { function: Box::new(function), lane: FairLane::new(1, 1) }
        };
        let images = |count: usize| {
            let url = |number| ImageFile::Url(format!("https://a.test/{number}").into());
            (0..count).map(url).collect::<Vec<_>>()
        };
        // Four at a time.
        for (seconds, count) in [(19, 4), (4, 16), (0, 256)] {
            let files = fetcher(seconds).files(&images(count)).await;
            assert_eq!(files.expect("in time").len(), count);
        }
        for (seconds, count, missing) in [(21, 1, 1), (9, 12, 9), (4, 21, 21), (3600, 256, 1)] {
            let error = fetcher(seconds).files(&images(count)).await.expect_err("too slow");
            let expected = format!(
                "image {missing}: expected all files of the request within 20s, got {} of {count} \
                 in time",
                missing - 1
            );
            assert_eq!(error.to_string(), expected);
            assert_eq!(Arc::strong_count(&fetching), 1, "no fetch goes on");
        }
    }
}
