//! The class `Engine`: a running engine.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use futures::{StreamExt, TryStreamExt, stream};
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use stolon::{Embedding, Error, Request};

use crate::answer::{Assembler, Completion};
use crate::cache::Cache;
use crate::error::Failure;
use crate::options::{EngineOptions, read, seconds};
use crate::process::{ProcessBound, wait, wait_with};
use crate::request::Spec;
use crate::sessions::Sessions;
use crate::stream::Stream;

/// Maximum number of requests of a batch that the engine has at the same time. The others wait
/// here, because an engine refuses requests when its queue is full.
const IN_FLIGHT: usize = 512;

/// Shortest time before a refused request of a batch is sent again.
const RETRY_MIN: Duration = Duration::from_millis(5);

/// A running engine. `stolon.Engine` wraps it.
#[pyclass(frozen, module = "stolon._native")]
#[derive(Debug)]
pub(crate) struct Engine {
    engine: ProcessBound<stolon::Engine>,
}

#[pymethods]
impl Engine {
    /// Loads a model. `options` is a JSON object.
    #[new]
    fn new(py: Python<'_>, model: String, options: &str) -> PyResult<Engine> {
        let options: EngineOptions = read(options)?;
        let engine = wait(py, options.builder(model)?.build())?;
        Ok(Engine { engine: ProcessBound::new(engine) })
    }

    /// Answers requests, a JSON array. `images` are the images of all requests in their order, with
    /// the index of the request. `progress` is called with the number of finished requests. Several
    /// requests wait as long as the engine is too busy; one is refused.
    fn complete(
        &self,
        py: Python<'_>,
        requests: &str,
        images: Vec<(usize, PyBackedBytes)>,
        progress: Option<Py<PyAny>>,
    ) -> PyResult<Vec<Completion>> {
        let engine = self.engine.get(py)?;
        let specs: Vec<Spec> = read(requests)?;
        let mut files = vec![Vec::new(); specs.len()];
        for (index, image) in images {
            if let Some(files) = files.get_mut(index) {
                files.push(image.to_vec());
            }
        }
        let count = specs.len();
        let done = AtomicUsize::new(0);
        let answers = specs.into_iter().zip(files).enumerate().map(|(index, (spec, images))| {
            let done = &done;
            async move {
                let answer = if count == 1 {
                    complete(engine, spec, images).await
                } else {
                    patiently(|| complete(engine, spec.clone(), images.clone()))
                        .await
                        .map_err(|failure| Failure::Prompt(index, Box::new(failure)))
                };
                done.fetch_add(1, Ordering::Relaxed);
                answer
            }
        });
        let answers = stream::iter(answers).buffered(IN_FLIGHT).try_collect::<Vec<_>>();
        let report = |py: Python<'_>| match &progress {
            Some(progress) => progress.call1(py, (done.load(Ordering::Relaxed),)).map(drop),
            None => Ok(()),
        };
        let answers = wait_with(py, answers, report)??;
        report(py)?;
        Ok(answers)
    }

    /// Begins to answer a request, a JSON object.
    fn stream(
        &self,
        py: Python<'_>,
        request: &str,
        images: Vec<PyBackedBytes>,
    ) -> PyResult<Stream> {
        let engine = self.engine.get(py)?.clone();
        let spec: Spec = read(request)?;
        let images = images.iter().map(|image| image.to_vec()).collect();
        let submitted = async move {
            let request = spec.prepare(&engine, images).await?;
            let assembler = Assembler::new(&request)?;
            Ok((engine.generate(request).await?, assembler))
        };
        Stream::start(py, submitted)
    }

    /// The embeddings of requests, a JSON array: values, number of tokens, number of cached ones.
    fn embed(
        &self,
        py: Python<'_>,
        requests: &str,
        dimensions: Option<usize>,
        task: Option<String>,
    ) -> PyResult<Vec<(Vec<f32>, usize, usize)>> {
        let engine = self.engine.get(py)?;
        let specs: Vec<Spec> = read(requests)?;
        let task = &task;
        let embeddings = specs.into_iter().map(|spec| async move {
            let mut request = spec.prepare(engine, Vec::new()).await?;
            if let Some(task) = task {
                request = request.task(task.as_str());
            }
            let embedding =
                patiently(|| async { Ok(engine.embed(request.clone(), dimensions).await?) })
                    .await?;
            let Embedding { values, prompt_tokens, cached_tokens, .. } = embedding;
            Ok::<_, Failure>((values, prompt_tokens, cached_tokens))
        });
        wait(py, stream::iter(embeddings).buffered(IN_FLIGHT).try_collect::<Vec<_>>())
    }

    /// The documents in the order of their scores for a query, the best one first: index, score,
    /// number of tokens of the query and the document.
    fn rerank(
        &self,
        py: Python<'_>,
        query: String,
        documents: Vec<String>,
        instruction: Option<String>,
    ) -> PyResult<Vec<(usize, f32, usize)>> {
        let engine = self.engine.get(py)?;
        let info = engine.model_info();
        let (query, instruction, most) = (&query, &instruction, info.max_positions);
        let documents = documents.into_iter().enumerate();
        let ranked = documents.map(|(index, document)| async move {
            let pair = Request::pair(query.as_str(), document).truncate(most);
            let pair = match instruction {
                Some(instruction) => pair.instruction(instruction.as_str()),
                None => pair,
            };
            let scores = patiently(|| async { Ok(engine.score(pair.clone()).await?) }).await?;
            match scores.values[..] {
                [score] => Ok((index, score, scores.prompt_tokens)),
                _ => Err(Failure::from(Error::NotForScores { model: info.id.clone() })),
            }
        });
        let ranked = stream::iter(ranked).buffered(IN_FLIGHT).try_collect::<Vec<_>>();
        let mut ranked = wait(py, ranked)?;
        ranked.sort_by(|a, b| b.1.total_cmp(&a.1));
        Ok(ranked)
    }

    /// The labels of each request, a JSON array, with their probabilities: `labels`, the answers of a
    /// language model, or those of a model for classification.
    fn classify(
        &self,
        py: Python<'_>,
        requests: &str,
        labels: Option<Vec<String>>,
    ) -> PyResult<Vec<Vec<(String, f32)>>> {
        let engine = self.engine.get(py)?;
        let specs: Vec<Spec> = read(requests)?;
        let info = engine.model_info();
        let (labels, own) = (&labels, info.scores.as_ref());
        let classified = specs.into_iter().map(|spec| async move {
            let request = spec.prepare(engine, Vec::new()).await?;
            patiently(|| async {
                let request = request.clone();
                let (labels, values) = match labels {
                    Some(labels) => {
                        let scores = engine.score_labels(request, labels).await?;
                        (labels, scores.probabilities())
                    }
                    None => {
                        let missing = || Error::NotForScores { model: info.id.clone() };
                        let own = &own.ok_or_else(missing)?.labels;
                        (own, engine.score(request).await?.values)
                    }
                };
                Ok(labels.iter().cloned().zip(values).collect::<Vec<_>>())
            })
            .await
        });
        wait(py, stream::iter(classified).buffered(IN_FLIGHT).try_collect::<Vec<_>>())
    }

    /// The token ids of a text.
    fn tokenize(&self, py: Python<'_>, text: String, add_special: bool) -> PyResult<Vec<u32>> {
        wait(py, self.engine.get(py)?.tokenize(text, add_special))
    }

    /// The text of token ids.
    fn detokenize(&self, py: Python<'_>, ids: Vec<u32>, skip_special: bool) -> PyResult<String> {
        let engine = self.engine.get(py)?;
        wait(py, async { engine.detokenize(&ids, skip_special) })
    }

    /// The token ids of a request's prompt, a JSON object.
    fn prompt_tokens(&self, py: Python<'_>, request: &str) -> PyResult<Vec<u32>> {
        let engine = self.engine.get(py)?;
        let spec: Spec = read(request)?;
        wait(py, async {
            let request = spec.prepare(engine, Vec::new()).await?;
            Ok::<_, Failure>(engine.prompt_tokens(&request).await?)
        })
    }

    /// The model and its sizes, as JSON.
    fn model_info(&self, py: Python<'_>) -> PyResult<String> {
        json(py, self.engine.get(py)?.model_info())
    }

    /// Counters and gauges, as JSON.
    fn stats(&self, py: Python<'_>) -> PyResult<String> {
        json(py, &self.engine.get(py)?.stats())
    }

    /// The prefix cache.
    fn cache(&self, py: Python<'_>) -> PyResult<Cache> {
        Ok(Cache::new(self.engine.share(py)?))
    }

    /// The sessions.
    fn sessions(&self, py: Python<'_>) -> PyResult<Sessions> {
        Ok(Sessions::new(self.engine.share(py)?))
    }

    /// Stops the engine, and waits at most `drain` seconds before that for the requests in flight.
    /// Returns whether all had ended.
    fn close(&self, py: Python<'_>, drain: f64) -> PyResult<bool> {
        let engine = self.engine.get(py)?;
        let limit = seconds("drain", drain)?;
        wait_with(py, engine.drain(limit), |_| Ok(()))
    }
}

/// Text of a value that observes the engine.
pub(crate) fn json(py: Python<'_>, value: &impl serde::Serialize) -> PyResult<String> {
    serde_json::to_string(value)
        .map_err(|error| crate::error::raise(py, "StolonError", error.to_string(), None))
}

/// Answers a request.
async fn complete(
    engine: &stolon::Engine,
    spec: Spec,
    images: Vec<Vec<u8>>,
) -> Result<Completion, Failure> {
    let request = spec.prepare(engine, images).await?;
    Ok(engine.complete(request).await?.into())
}

/// Does a part of the work of a batch, and again as long as the engine is too busy.
async fn patiently<T, F: Future<Output = Result<T, Failure>>>(
    work: impl Fn() -> F,
) -> Result<T, Failure> {
    loop {
        let result = work().await;
        let Some(after) = result.as_ref().err().and_then(Failure::busy) else { return result };
        tokio::time::sleep(after.max(RETRY_MIN)).await;
    }
}
