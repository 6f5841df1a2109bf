//! [`FairLane`]: long work, a bounded number at a time, shared fairly by clients.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::oneshot;

/// The client that has sent a request, if it is known: its tenant.
pub(crate) type Client = Option<Arc<str>>;

/// Lets work of several clients run, at most `slots` at a time, and at most `slots_of_client` of one
/// client.
///
/// A free slot goes to the client that has used the least time so far, and among equals to the work
/// that arrived first; work of one client starts in order of arrival. If `slots_of_client` is
/// smaller than `slots`, a second client never waits for running work of the first. The used time
/// of a client is remembered for as long as it has work here.
#[derive(Debug)]
pub(crate) struct FairLane {
    /// Maximum number of pieces of work that run at the same time; at least 1.
    slots: usize,
    /// Maximum number of these that belong to one client; at least 1.
    slots_of_client: usize,
    clients: Mutex<Clients>,
}

#[derive(Debug, Default)]
struct Clients {
    /// The clients with running or waiting work.
    usage: HashMap<Client, Usage>,
    /// Number of pieces of work that have come.
    arrivals: u64,
}

/// The work of one client that has running or waiting work.
#[derive(Debug, Default)]
struct Usage {
    running: usize,
    /// The waiting work in order of arrival, each with its arrival number.
    waiting: VecDeque<(u64, oneshot::Sender<Slot>)>,
    /// Total time of its work that has ended. It starts at the time of the client that had used
    /// least when this one arrived.
    spent: Duration,
}

/// The permission to work. Dropping it passes the slot on.
#[derive(Debug)]
pub(crate) struct Slot {
    lane: Arc<FairLane>,
    client: Client,
    begun: Instant,
    is_free: bool,
}

impl FairLane {
    /// A lane with at least one slot, and at least one for each client.
    pub(crate) fn new(slots: usize, slots_of_client: usize) -> Arc<FairLane> {
        let (slots, slots_of_client) = (slots.max(1), slots_of_client.max(1));
        Arc::new(FairLane { slots, slots_of_client, clients: Mutex::default() })
    }

    /// Waits for a slot. If the future is dropped, it waits no longer.
    pub(crate) async fn slot(self: &Arc<FairLane>, client: Client) -> Slot {
        let (sender, receiver) = oneshot::channel();
        {
            let mut clients = self.lock();
            let Clients { usage, arrivals } = &mut *clients;
            *arrivals += 1;
            let least = usage.values().map(|usage| usage.spent).min().unwrap_or_default();
            let usage = usage
                .entry(client.clone())
                .or_insert_with(|| Usage { spent: least, ..Usage::default() });
            usage.waiting.push_back((*arrivals, sender));
        }
        self.hand_out();
        match receiver.await {
            Ok(slot) => slot,
            // The sender is kept until a slot is sent.
            Err(_) => Slot::new(self, client),
        }
    }

    /// Gives the free slots to waiting work.
    fn hand_out(self: &Arc<FairLane>) {
        while let Some((client, sender)) = self.next() {
            // If the caller does not wait any longer, its slot is returned.
            if let Err(mut slot) = sender.send(Slot::new(self, client)) {
                slot.free();
            }
        }
    }

    /// Takes a slot for the client that is next, if there is one.
    fn next(&self) -> Option<(Client, oneshot::Sender<Slot>)> {
        let mut clients = self.lock();
        let running: usize = clients.usage.values().map(|usage| usage.running).sum();
        if running >= self.slots {
            return None;
        }
        let next = clients.usage.iter_mut().filter_map(|(client, usage)| {
            let (arrival, _) =
                usage.waiting.front().filter(|_| usage.running < self.slots_of_client)?;
            Some(((usage.spent, usage.running, *arrival), client, usage))
        });
        let (_, client, usage) = next.min_by_key(|(order, ..)| *order)?;
        let (_, sender) = usage.waiting.pop_front()?;
        usage.running += 1;
        Some((client.clone(), sender))
    }

    fn lock(&self) -> MutexGuard<'_, Clients> {
        // The state is valid between any two statements, so a poisoned lock is taken too.
        self.clients.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Slot {
    fn new(lane: &Arc<FairLane>, client: Client) -> Slot {
        Slot { lane: Arc::clone(lane), client, begun: Instant::now(), is_free: false }
    }

    /// Returns the slot, without passing it on.
    fn free(&mut self) {
        self.is_free = true;
        let clients = &mut self.lane.lock().usage;
        if let Some(usage) = clients.get_mut(&self.client) {
            usage.running = usage.running.saturating_sub(1);
            usage.spent += self.begun.elapsed();
            if usage.running == 0 && usage.waiting.is_empty() {
                clients.remove(&self.client);
            }
        }
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        if !self.is_free {
            self.free();
            self.lane.hand_out();
        }
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;

    use super::*;

    fn client(name: &str) -> Client {
        Some(name.into())
    }

    /// Goal: one client never has all slots, and waits in order of arrival for its own.
    #[test]
    fn a_slot_is_left_for_others() {
        let lane = FairLane::new(2, 1);
        let first = lane.slot(client("a")).now_or_never().expect("a free slot");
        let mut second = Box::pin(lane.slot(client("a")));
        let mut third = Box::pin(lane.slot(client("a")));
        assert!(second.as_mut().now_or_never().is_none(), "the other slot is for others");
        assert!(third.as_mut().now_or_never().is_none());
        let other = lane.slot(client("b")).now_or_never().expect("a free slot");
        let mut unknown = Box::pin(lane.slot(None));
        assert!(unknown.as_mut().now_or_never().is_none(), "both are in use");
        drop(first);
        drop(other);
        assert!(unknown.as_mut().now_or_never().is_some());
        let second = second.as_mut().now_or_never().expect("its turn");
        assert!(third.as_mut().now_or_never().is_none());
        drop(second);
        assert!(third.as_mut().now_or_never().is_some());
        drop((unknown, third));
        assert!(lane.lock().usage.is_empty(), "nothing is kept of clients without work");
    }

    /// Goal: a free slot goes to the client that has used less time, however much work of others
    /// came before; a client that comes later does not profit from the time before.
    #[test]
    fn the_client_that_used_less_is_next() {
        let lane = FairLane::new(1, 1);
        let mut running = lane.slot(client("a")).now_or_never().expect("a free slot");
        let mut flood: Vec<_> = (0..5).map(|_| Box::pin(lane.slot(client("a")))).collect();
        assert!(flood.iter_mut().all(|slot| slot.as_mut().now_or_never().is_none()));
        running.begun -= Duration::from_secs(5);
        drop(running);
        let mut running = flood.remove(0).now_or_never().expect("no other client waits");
        let mut late: Vec<_> = (0..2).map(|_| Box::pin(lane.slot(client("b")))).collect();
        assert!(late.iter_mut().all(|slot| slot.as_mut().now_or_never().is_none()));
        running.begun -= Duration::from_secs(1);
        drop(running);
        let mut running = late.remove(0).now_or_never().expect("it has used less");
        running.begun -= Duration::from_secs(3);
        drop(running);
        let running = flood.remove(0).now_or_never().expect("now that one has used less");
        drop(running);
    }

    /// Goal: work whose caller does not wait any longer takes no slot from others.
    #[test]
    fn work_that_was_given_up_takes_no_slot() {
        let lane = FairLane::new(1, 1);
        let running = lane.slot(client("a")).now_or_never().expect("a free slot");
        let mut given_up = Box::pin(lane.slot(client("b")));
        let mut waiting = Box::pin(lane.slot(client("c")));
        assert!(given_up.as_mut().now_or_never().is_none());
        assert!(waiting.as_mut().now_or_never().is_none());
        drop(given_up);
        drop(running);
        drop(waiting.as_mut().now_or_never().expect("its turn"));
        drop(waiting);
        assert!(lane.lock().usage.is_empty());
    }

    /// Goal: clients that have used the same time take turns in order of arrival, so that a client
    /// whose work waits is not overtaken by others that return with more work.
    #[test]
    fn equal_clients_are_served_in_order_of_arrival() {
        let lane = FairLane::new(1, 1);
        let mut running = lane.slot(client("0")).now_or_never().expect("a free slot");
        let names: Vec<String> = (1..20).map(|name| name.to_string()).collect();
        let mut waiting: VecDeque<_> =
            names.iter().map(|name| Box::pin(lane.slot(client(name)))).collect();
        assert!(waiting.iter_mut().all(|slot| slot.as_mut().now_or_never().is_none()));
        for name in names.iter().cycle().take(60) {
            // It takes no time in this test.
            running.begun = Instant::now() + Duration::from_secs(1);
            drop(running);
            running = waiting.pop_front().and_then(FutureExt::now_or_never).expect("its turn");
            assert_eq!(running.client, client(name));
            waiting.push_back(Box::pin(lane.slot(client(name))));
            assert!(waiting.back_mut().is_some_and(|slot| slot.as_mut().now_or_never().is_none()));
        }
    }
}
