//! The signals that stop `stolon serve`, or make it read its keys and certificates again.

/// The reaction of the server to a signal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Interrupt {
    /// To stop: SIGINT (Ctrl-C) or SIGTERM.
    Stop,
    /// To read files again: SIGHUP.
    Reload,
}

/// The signals. One value lives as long as the server, because a signal that arrives while no value
/// exists is lost, or ends the process.
#[derive(Debug)]
pub(super) struct Interrupts {
    #[cfg(unix)]
    stopping: [tokio::signal::unix::Signal; 2],
    #[cfg(unix)]
    hangup: Option<tokio::signal::unix::Signal>,
    #[cfg(windows)]
    stopping: Events,
}

/// Ctrl-C, Ctrl-Break, the end of the console, and the end of the system.
#[cfg(windows)]
type Events = (
    tokio::signal::windows::CtrlC,
    tokio::signal::windows::CtrlBreak,
    tokio::signal::windows::CtrlClose,
    tokio::signal::windows::CtrlShutdown,
);

impl Interrupts {
    /// `can_reload` says whether there is anything to read again. Without it, SIGHUP ends the
    /// process, as it should when the terminal is closed.
    #[cfg(unix)]
    pub(super) fn new(can_reload: bool) -> std::io::Result<Self> {
        use tokio::signal::unix::{SignalKind, signal};
        let stopping = [signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?];
        let hangup = can_reload.then(|| signal(SignalKind::hangup())).transpose()?;
        Ok(Self { stopping, hangup })
    }

    #[cfg(windows)]
    pub(super) fn new(_can_reload: bool) -> std::io::Result<Self> {
        use tokio::signal::windows::{ctrl_break, ctrl_c, ctrl_close, ctrl_shutdown};
        Ok(Self { stopping: (ctrl_c()?, ctrl_break()?, ctrl_close()?, ctrl_shutdown()?) })
    }

    /// Waits for a signal to stop. Calls `reload` at each one to read files again.
    pub(super) async fn stop(&mut self, reload: impl Fn()) {
        while self.next().await == Interrupt::Reload {
            reload();
        }
    }

    /// Waits for the next signal.
    #[cfg(unix)]
    async fn next(&mut self) -> Interrupt {
        let [interrupt, terminate] = &mut self.stopping;
        let hangup = async {
            match &mut self.hangup {
                Some(hangup) => hangup.recv().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            _ = interrupt.recv() => Interrupt::Stop,
            _ = terminate.recv() => Interrupt::Stop,
            _ = hangup => Interrupt::Reload,
        }
    }

    /// Waits for the next signal.
    #[cfg(windows)]
    async fn next(&mut self) -> Interrupt {
        let (interrupt, stop, close, shutdown) = &mut self.stopping;
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = stop.recv() => {}
            _ = close.recv() => {}
            _ = shutdown.recv() => {}
        }
        Interrupt::Stop
    }
}
