//! A program in the foreground: it has the terminal, and signals reach it.
//!
//! On Unix, the keys Ctrl-C and Ctrl-\ send their signals to every process in the foreground, so to
//! the program, too. Other signals are sent to this process alone, which passes them on.

#[cfg(unix)]
pub(super) use unix::{Signals, run};

#[cfg(not(unix))]
pub(super) use other::{Signals, run};

#[cfg(unix)]
mod unix {
    use std::io::{self, IsTerminal, stdin};
    use std::os::unix::process::ExitStatusExt;
    use std::process::{Command, ExitCode, ExitStatus};

    use rustix::process::{Pid, Signal, kill_process};
    use tokio::signal::unix::{self, SignalKind, signal};

    /// What is added to the number of a signal in an exit status, as shells do.
    const BY_SIGNAL: i32 = 128;

    /// The signals that would end this process. Once this exists, they no longer do.
    #[derive(Debug)]
    pub(in super::super) struct Signals {
        interrupt: unix::Signal,
        quit: unix::Signal,
        terminate: unix::Signal,
        hangup: unix::Signal,
    }

    impl Signals {
        pub(in super::super) fn new() -> io::Result<Self> {
            Ok(Self {
                interrupt: signal(SignalKind::interrupt())?,
                quit: signal(SignalKind::quit())?,
                terminate: signal(SignalKind::terminate())?,
                hangup: signal(SignalKind::hangup())?,
            })
        }

        /// Waits for a signal. Returns the exit status of a process that it ends.
        pub(in super::super) async fn interrupted(&mut self) -> ExitCode {
            code(BY_SIGNAL + self.next().await.as_raw())
        }

        async fn next(&mut self) -> Signal {
            tokio::select! {
                _ = self.interrupt.recv() => Signal::INT,
                _ = self.quit.recv() => Signal::QUIT,
                _ = self.terminate.recv() => Signal::TERM,
                _ = self.hangup.recv() => Signal::HUP,
            }
        }
    }

    /// Runs a command until it ends, and returns its exit status. If a signal has ended it, that is
    /// 128 and the number of the signal, as in shells.
    ///
    /// # Errors
    /// If it cannot be started.
    pub(in super::super) async fn run(
        mut command: Command,
        signals: &mut Signals,
    ) -> io::Result<ExitCode> {
        // Before the child starts, so that its end is not missed.
        let mut ends = signal(SignalKind::child())?;
        let mut child = command.spawn()?;
        loop {
            if let Some(status) = child.try_wait()? {
                return Ok(code(number(status)));
            }
            tokio::select! {
                _ = ends.recv() => {}
                signal = signals.next() => {
                    let is_of_keyboard = [Signal::INT, Signal::QUIT].contains(&signal);
                    if !(is_of_keyboard && stdin().is_terminal()) {
                        // Fails if the child has ended, which the next turn notices.
                        let _ = kill_process(Pid::from_child(&child), signal);
                    }
                }
            }
        }
    }

    fn number(status: ExitStatus) -> i32 {
        status.code().or(status.signal().map(|signal| BY_SIGNAL + signal)).unwrap_or(1)
    }

    fn code(number: i32) -> ExitCode {
        u8::try_from(number).map_or(ExitCode::FAILURE, ExitCode::from)
    }
}

#[cfg(not(unix))]
mod other {
    use std::io;
    use std::process::{Command, ExitCode};

    /// Ctrl-C, which reaches the program by itself.
    #[derive(Debug)]
    pub(in super::super) struct Signals;

    impl Signals {
        pub(in super::super) fn new() -> io::Result<Self> {
            Ok(Self)
        }

        /// Waits for Ctrl-C. From then on, it does not end this process.
        pub(in super::super) async fn interrupted(&mut self) -> ExitCode {
            if tokio::signal::ctrl_c().await.is_err() {
                std::future::pending::<()>().await; // No handler could be installed.
            }
            ExitCode::FAILURE
        }
    }

    /// Runs a command until it ends, and returns its exit status.
    ///
    /// # Errors
    /// If it cannot be started.
    pub(in super::super) async fn run(
        mut command: Command,
        signals: &mut Signals,
    ) -> io::Result<ExitCode> {
        let mut child = command.spawn()?;
        let mut ended = tokio::task::spawn_blocking(move || child.wait());
        let status = loop {
            tokio::select! {
                status = &mut ended => break status.map_err(io::Error::other)??,
                _ = signals.interrupted() => {}
            }
        };
        let code = status.code().and_then(|code| u8::try_from(code).ok());
        Ok(code.map_or(ExitCode::FAILURE, ExitCode::from))
    }
}
