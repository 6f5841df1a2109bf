//! The signals that stop `stolon serve`.

/// SIGINT (Ctrl-C) and SIGTERM. One value lives as long as the server, because a signal that comes
/// while none exists is lost.
#[derive(Debug)]
pub(super) struct Interrupts {
    #[cfg(unix)]
    signals: [tokio::signal::unix::Signal; 2],
}

impl Interrupts {
    #[cfg(unix)]
    pub(super) fn new() -> std::io::Result<Self> {
        use tokio::signal::unix::{SignalKind, signal};
        let signals = [signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?];
        Ok(Self { signals })
    }

    #[cfg(not(unix))]
    pub(super) fn new() -> std::io::Result<Self> {
        Ok(Self {})
    }

    /// Waits for the next signal.
    #[cfg(unix)]
    pub(super) async fn next(&mut self) {
        let [interrupt, terminate] = &mut self.signals;
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
        }
    }

    /// Waits for the next signal.
    #[cfg(not(unix))]
    pub(super) async fn next(&mut self) {
        if tokio::signal::ctrl_c().await.is_err() {
            std::future::pending::<()>().await; // No handler could be installed.
        }
    }
}
