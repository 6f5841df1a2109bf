//! The limits of the admission queue, enforced in the caller's task before any message is sent.
//!
//! A [`QueuePermit`] accounts for one waiting request, its uncached tokens, and the pixels of its
//! images. It travels with the request and is returned by dropping it, when the request starts to run
//! or goes away. Actor mailboxes have no bound of their own; requiring a permit for every submission
//! bounds them. A tenant with a name leaves a part of the queue to others.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use arc_swap::ArcSwap;

use crate::error::EngineError;
use crate::sync::{AtomicUsize, Mutex, MutexGuard, Ordering, lock};
use crate::tenant::TenantId;
use crate::wait::Workload;

/// Number of equal parts of the queue. A tenant with a name may fill all of them except one.
const PARTS: usize = 4;

/// The limits, and the shared counts of waiting requests, tokens and pixels.
#[derive(Debug)]
pub(crate) struct QueueLimits {
    max: Queued,
    /// Maximum number of bytes of pixels.
    max_pixels: usize,
    requests: AtomicUsize,
    tokens: AtomicUsize,
    pixels: AtomicUsize,
    /// The waiting requests of each tenant with a name.
    tenants: Mutex<HashMap<TenantId, Queued>>,
    /// Recent throughput in computed tokens per second; 0 while unknown.
    rate: AtomicU64,
    /// What the scheduler has published of its requests.
    workload: ArcSwap<Workload>,
}

/// Requests that wait.
#[derive(Clone, Copy, Debug, Default)]
struct Queued {
    requests: usize,
    /// Their uncached tokens.
    tokens: usize,
}

impl Queued {
    /// Whether a request with `tokens` more exceeds the limits. While no tokens are waiting, any
    /// number of them fits.
    ///
    /// Each limit is compared with its own count only, because another caller may have raised only
    /// one of the counts yet.
    fn exceeds(self, tokens: usize, max: Queued) -> bool {
        self.requests >= max.requests
            || (self.tokens > 0 && self.tokens.saturating_add(tokens) > max.tokens)
    }
}

/// The place of one request in the admission queue.
#[derive(Debug)]
pub struct QueuePermit {
    limits: Arc<QueueLimits>,
    tenant: Option<TenantId>,
    tokens: usize,
    /// Bytes of the pixels of its images.
    pixels: usize,
    /// Uncached tokens that were waiting when the permit was issued.
    ahead: usize,
}

impl QueuePermit {
    /// Number of uncached tokens of the request when it arrived.
    pub(crate) fn tokens(&self) -> usize {
        self.tokens
    }

    /// Number of uncached tokens that were waiting when this request arrived.
    pub(crate) fn ahead(&self) -> usize {
        self.ahead
    }
}

impl QueueLimits {
    /// Limits of requests, of their uncached tokens, and of the bytes of their images' pixels.
    pub(crate) fn new(max_requests: usize, max_tokens: usize, max_pixels: usize) -> QueueLimits {
        QueueLimits {
            max: Queued { requests: max_requests, tokens: max_tokens },
            max_pixels,
            requests: AtomicUsize::new(0),
            tokens: AtomicUsize::new(0),
            pixels: AtomicUsize::new(0),
            tenants: Mutex::new(HashMap::new()),
            rate: AtomicU64::new(0),
            workload: ArcSwap::default(),
        }
    }

    /// The maximum of waiting requests: of `tenant` if it has a name, or of all tenants.
    fn max(&self, tenant: Option<TenantId>) -> Queued {
        let part = |max: usize| if tenant.is_some() { max - max / PARTS } else { max };
        Queued { requests: part(self.max.requests), tokens: part(self.max.tokens) }
    }

    /// Maximum number of waiting requests: of `tenant` if it has a name, or of all tenants.
    pub(crate) fn requests_max(&self, tenant: Option<TenantId>) -> usize {
        self.max(tenant).requests
    }

    /// Issues a permit for a request with `tokens` uncached tokens, and images with `pixels` bytes,
    /// of a tenant with a name. While nothing else is waiting, a request of any size gets one, and
    /// while no pixels are waiting, one with images of any size.
    ///
    /// # Errors
    /// [`EngineError::Overloaded`] if a limit of requests or tokens is reached, and
    /// [`EngineError::ImagesOverloaded`] if that of pixels is.
    pub(crate) fn acquire(
        self: &Arc<QueueLimits>,
        tenant: Option<TenantId>,
        tokens: usize,
        pixels: usize,
    ) -> Result<QueuePermit, EngineError> {
        // Each count is raised first and lowered again on refusal. Two concurrent callers can
        // refuse each other, but they can never both pass a limit. The counts guard no other
        // memory, so relaxed ordering suffices.
        let requests = self.requests.fetch_add(1, Ordering::Relaxed);
        let queued = self.tokens.fetch_add(tokens, Ordering::Relaxed);
        let queued_pixels = self.pixels.fetch_add(pixels, Ordering::Relaxed);
        let own = tenant.map(|tenant| (Some(tenant), self.add(tenant, tokens)));
        let limits = Arc::clone(self);
        let permit = QueuePermit { limits, tenant, tokens, pixels, ahead: queued };
        let all = Queued { requests, tokens: queued };
        for (tenant, queued) in [Some((None, all)), own].into_iter().flatten() {
            if queued.exceeds(tokens, self.max(tenant)) {
                drop(permit);
                return Err(EngineError::Overloaded {
                    retry_after: self.until_room(tenant, queued, tokens),
                    queued_requests: queued.requests,
                    queued_tokens: queued.tokens,
                });
            }
        }
        let is_alone = queued_pixels == 0 || pixels == 0;
        if !is_alone && queued_pixels.saturating_add(pixels) > self.max_pixels {
            drop(permit);
            return Err(EngineError::ImagesOverloaded {
                retry_after: self.until_room(None, all, tokens),
                queued_bytes: queued_pixels,
                bytes: pixels,
                limit: self.max_pixels,
            });
        }
        Ok(permit)
    }

    /// Whether a request with `tokens` uncached tokens would get no permit now.
    pub(crate) fn is_full(&self, tokens: usize) -> bool {
        let requests = self.requests.load(Ordering::Relaxed);
        Queued { requests, tokens: self.queued_tokens() }.exceeds(tokens, self.max)
    }

    /// Adds a request to the waiting ones of a tenant. Returns those that waited before.
    fn add(&self, tenant: TenantId, tokens: usize) -> Queued {
        let mut tenants = self.tenants();
        let queued = tenants.entry(tenant).or_default();
        let before = *queued;
        queued.requests += 1;
        queued.tokens = queued.tokens.saturating_add(tokens);
        before
    }

    fn tenants(&self) -> MutexGuard<'_, HashMap<TenantId, Queued>> {
        lock(&self.tenants)
    }

    /// Number of uncached tokens of all requests that hold a permit.
    pub(crate) fn queued_tokens(&self) -> usize {
        self.tokens.load(Ordering::Relaxed)
    }

    #[cfg(test)]
    pub(crate) fn waiting(&self) -> usize {
        self.requests.load(Ordering::Relaxed)
    }

    /// Publishes what the scheduler has to do.
    pub(crate) fn set_workload(&self, workload: Workload) {
        self.workload.store(Arc::new(workload));
    }

    /// The workload that the scheduler has published last.
    pub(crate) fn workload(&self) -> Arc<Workload> {
        self.workload.load_full()
    }

    /// The time until `tokens` uncached tokens would get a permit, from 50 ms to 10 minutes, while
    /// `queued` waits: of a tenant, if it has a name, or of all.
    fn until_room(&self, tenant: Option<TenantId>, queued: Queued, tokens: usize) -> Duration {
        let (workload, max) = (self.workload(), self.max(tenant));
        let mut left = queued;
        let mut started = 0;
        for waiting in &workload.waiting {
            let fits =
                left.requests < max.requests && left.tokens.saturating_add(tokens) <= max.tokens;
            if fits {
                break;
            }
            started += 1;
            if tenant.is_none_or(|tenant| tenant == waiting.work.tenant) {
                left.requests = left.requests.saturating_sub(1);
                left.tokens = left.tokens.saturating_sub(waiting.work.pending);
            }
        }
        let until = workload.starts(started.max(1)).unwrap_or(Duration::from_secs(1));
        until.clamp(Duration::from_millis(50), Duration::from_secs(600))
    }

    /// Sets the recent throughput.
    pub(crate) fn set_rate(&self, tokens_per_second: f64) {
        self.rate.store(tokens_per_second as u64, Relaxed);
    }

    /// Estimated time to compute half of `tokens`, which a client has in flight, from 50 ms to 60 s.
    pub(crate) fn retry_after(&self, tokens: usize) -> Duration {
        let rate = self.rate.load(Relaxed);
        if rate == 0 {
            return Duration::from_secs(1);
        }
        let seconds = tokens as f64 / 2.0 / rate as f64;
        Duration::from_secs_f64(seconds.clamp(0.05, 60.0))
    }
}

/// The limits of a queue without a scheduler, for the loom models.
#[cfg(loom)]
#[derive(Clone, Debug)]
pub struct ModelQueue(Arc<QueueLimits>);

#[cfg(loom)]
impl ModelQueue {
    /// At most `max_requests` requests may wait, with `max_tokens` tokens and `max_pixels` bytes of
    /// pixels.
    pub fn new(max_requests: usize, max_tokens: usize, max_pixels: usize) -> ModelQueue {
        ModelQueue(Arc::new(QueueLimits::new(max_requests, max_tokens, max_pixels)))
    }

    /// A permit for a request of a tenant with `tokens` tokens and `pixels` bytes of pixels, or
    /// `None` if too many wait.
    pub fn acquire(
        &self,
        tenant: Option<&str>,
        tokens: usize,
        pixels: usize,
    ) -> Option<QueuePermit> {
        self.0.acquire(tenant.map(|name| TenantId::new(Some(name))), tokens, pixels).ok()
    }

    /// Number of requests that wait, of their tokens, of the bytes of their pixels, and of tenants
    /// with requests.
    pub fn counts(&self) -> (usize, usize, usize, usize) {
        let limits = &*self.0;
        let counts = [&limits.requests, &limits.tokens, &limits.pixels];
        let [requests, tokens, pixels] = counts.map(|count| count.load(Ordering::Relaxed));
        (requests, tokens, pixels, limits.tenants().len())
    }
}

impl Drop for QueuePermit {
    fn drop(&mut self) {
        self.limits.requests.fetch_sub(1, Ordering::Relaxed);
        self.limits.tokens.fetch_sub(self.tokens, Ordering::Relaxed);
        self.limits.pixels.fetch_sub(self.pixels, Ordering::Relaxed);
        let Some(tenant) = self.tenant else { return };
        let mut tenants = self.limits.tenants();
        let Some(queued) = tenants.get_mut(&tenant) else { return };
        queued.requests -= 1;
        queued.tokens = queued.tokens.saturating_sub(self.tokens);
        if queued.requests == 0 {
            tenants.remove(&tenant);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::OnceLock;

    use super::*;
    use crate::policy::Place;
    use crate::step_cost::{StepCost, StepWork};
    use crate::tenant::TenantId;
    use crate::wait::{WaitingWork, Work};

    fn refused(result: Result<QueuePermit, EngineError>) -> bool {
        matches!(result, Err(EngineError::Overloaded { .. }))
    }

    #[test]
    fn a_dropped_permit_makes_room_for_another_request() {
        let limits = Arc::new(QueueLimits::new(2, 1000, 1));
        let first = limits.acquire(None, 1, 0).expect("empty");
        let _second = limits.acquire(None, 1, 0).expect("one place left");
        assert!(refused(limits.acquire(None, 1, 0)));
        drop(first);
        assert!(limits.acquire(None, 1, 0).is_ok());
    }

    #[test]
    fn the_token_limit_counts_uncached_tokens_and_a_refusal_changes_no_count() {
        let limits = Arc::new(QueueLimits::new(10, 100, 1));
        let _first = limits.acquire(None, 60, 0).expect("fits");
        for _ in 0..5 {
            assert!(refused(limits.acquire(None, 41, 0)));
        }
        assert!(limits.is_full(41) && !limits.is_full(40));
        assert!(limits.acquire(None, 40, 0).is_ok());
        assert_eq!(limits.waiting(), 1);
    }

    /// Goal: the pixels of waiting requests are bounded, requests without images are not refused for
    /// them, and a refusal changes no count.
    #[test]
    fn waiting_pixels_are_bounded() {
        let limits = Arc::new(QueueLimits::new(10, 100, 50));
        let large = limits.acquire(None, 1, 60).expect("nothing else waits");
        for _ in 0..3 {
            let refused = limits.acquire(None, 1, 1).expect_err("too many pixels");
            let message = refused.to_string();
            assert!(message.contains("60 bytes") && message.contains("at most 50"), "{message}");
            assert!(refused.is_retryable());
        }
        let _text = limits.acquire(None, 1, 0).expect("no pixels");
        drop(large);
        let _images = limits.acquire(None, 1, 50).expect("as many as may wait");
        assert!(limits.acquire(None, 1, 1).is_err());
        assert_eq!(limits.waiting(), 2);
    }

    #[test]
    fn a_request_of_any_size_is_accepted_while_the_queue_is_empty() {
        let limits = Arc::new(QueueLimits::new(10, 100, 1));
        let large = limits.acquire(None, 5000, 0).expect("nothing else waits");
        assert!(refused(limits.acquire(None, 1, 0)));
        drop(large);
        assert!(limits.acquire(None, 1, 0).is_ok());
    }

    /// Goal: a tenant with a name leaves a quarter of the places and of the tokens to others, and gets
    /// them back when its requests start.
    #[test]
    fn a_tenant_leaves_room_for_others() {
        let limits = Arc::new(QueueLimits::new(8, 100, 1));
        let [a, b] = ["a", "b"].map(|name| Some(TenantId::new(Some(name))));
        let six: Vec<_> =
            (0..6).map(|_| limits.acquire(a, 10, 0).expect("three quarters")).collect();
        let error = limits.acquire(a, 1, 0).expect_err("two places are for others");
        let is_own =
            matches!(error, EngineError::Overloaded { queued_requests: 6, queued_tokens: 60, .. });
        assert!(is_own, "{error:?}");
        assert_eq!(limits.requests_max(a), 6);
        let other = limits.acquire(b, 25, 0).expect("there is room");
        assert!(limits.acquire(b, 16, 0).is_err(), "too many tokens of all");
        drop(six);
        assert!(limits.acquire(b, 51, 0).is_err(), "too many tokens of one");
        assert!(limits.acquire(b, 50, 0).is_ok());
        drop(other);
        assert!(limits.tenants().is_empty(), "nothing is kept of tenants without requests");
    }

    /// Goal: the time until there is room is the time until the start of the request that makes it,
    /// whether the number of requests or their tokens are the limit.
    #[test]
    fn room_is_predicted_from_the_start_that_makes_it() {
        let waiting = |pending| {
            let tenant = TenantId::default();
            let work = Work { position: 0, pending, decode: 1, class: 0, tenant };
            WaitingWork { work, place: Place::new(0, 0, 0) }
        };
        let limits = QueueLimits::new(4, 100, 1);
        let starts = OnceLock::from(vec![1.0, 2.0, 4.0, 8.0]);
        let mut cost = StepCost::default();
        cost.note(StepWork::prompt(0.0, 1.0), Duration::from_secs(1));
        let waiting = vec![waiting(10), waiting(20), waiting(30), waiting(40)];
        limits.set_workload(Workload { waiting, starts, cost, ..Workload::default() });
        for (requests, queued, tokens, seconds) in [
            (4, 100, 5, 1),  // After the first start there is room for 10.
            (4, 100, 10, 1), // Exactly as much.
            (4, 100, 11, 2),
            (4, 100, 31, 4),
            (4, 100, 1000, 8), // Never, but all will have started.
            (4, 50, 5, 1),     // There are only too many requests.
            (6, 50, 5, 4),
            (2, 50, 5, 1), // There is room: the next start is near.
        ] {
            let time = limits.until_room(None, Queued { requests, tokens: queued }, tokens);
            assert_eq!(time, Duration::from_secs(seconds), "{requests} {queued} {tokens}");
        }
    }

    #[test]
    fn the_retry_hint_follows_the_throughput_within_its_bounds() {
        let limits = Arc::new(QueueLimits::new(1, 100, 1));
        assert_eq!(limits.retry_after(100), Duration::from_secs(1));
        limits.set_rate(100.0);
        assert_eq!(limits.retry_after(1000), Duration::from_secs(5));
        assert_eq!(limits.retry_after(0), Duration::from_millis(50));
        assert_eq!(limits.retry_after(1_000_000), Duration::from_secs(60));
    }
}
