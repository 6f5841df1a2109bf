//! A server whose backend never returns from a step. The test runs itself as the server's process,
//! because the command has no such backend.

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "the output of that process")]

use std::io::{BufRead, BufReader, Read};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use clap::Parser;
use stolon::backend::{Backend, BackendError, BackendSpec, StepBatch, StepOutput};
use stolon::{Engine, Request};
use stolon_cli::serve::ServeArgs;

const IS_SERVER: &str = "STOLON_TEST_HUNG_SERVER";

/// The command line of the server.
#[derive(Parser)]
struct Arguments {
    #[command(flatten)]
    serve: ServeArgs,
}

struct HungBackend(BackendSpec);

impl Backend for HungBackend {
    fn spec(&self) -> &BackendSpec {
        &self.0
    }

    fn step(&mut self, _: &StepBatch) -> Result<StepOutput, BackendError> {
        println!("the step has begun");
        loop {
            std::thread::park();
        }
    }
}

async fn serve() {
    let arguments = ["stolon", "--port", "0", "--shutdown-timeout", "1", "any"];
    let arguments = Arguments::parse_from(arguments);
    let engine = async {
        let spec = BackendSpec {
            vocab_size: 8,
            max_positions: 64,
            block_size: 16,
            block_count: 8,
            ..BackendSpec::default()
        };
        let engine = Engine::builder().backend("hung", Box::new(HungBackend(spec)));
        let engine = engine.build().await?;
        let stream = engine.generate(Request::tokens([1, 2, 3])).await?;
        // Its request is not canceled.
        std::mem::forget(stream);
        Ok(engine)
    };
    let error = arguments.serve.run_with(engine).await.expect_err("the engine does not stop");
    eprintln!("error: {error}");
}

/// Goal: a server whose engine does not stop, because a step hangs, ends at a second signal, with a
/// message.
#[tokio::test]
async fn a_second_signal_ends_a_server_that_hangs() {
    if std::env::var_os(IS_SERVER).is_some() {
        return serve().await;
    }
    let name = "hung_backend::a_second_signal_ends_a_server_that_hangs";
    let mut child = Command::new(std::env::current_exe().expect("the tests"))
        .args(["--exact", name, "--nocapture"])
        .env(IS_SERVER, "1")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("it starts");
    let terminate = |id: u32| {
        let status = Command::new("kill").args(["-TERM", &id.to_string()]).status();
        assert!(status.expect("kill runs").success());
    };
    let mut lines = BufReader::new(child.stdout.take().expect("a pipe")).lines();
    let mut missing = vec!["listening on", "the step has begun"];
    while !missing.is_empty() {
        let line = lines.next().expect("more lines").expect("UTF-8");
        missing.retain(|part| !line.contains(part));
    }
    terminate(child.id());
    // Signals that come together count once. The engine stops after the requests had their time.
    std::thread::sleep(Duration::from_secs(3));
    assert!(child.try_wait().expect("waited").is_none(), "it waits for the engine");
    terminate(child.id());
    let deadline = Instant::now() + Duration::from_secs(30);
    while child.try_wait().expect("waited").is_none() {
        if Instant::now() > deadline {
            child.kill().expect("killed");
            panic!("it did not hear the signal");
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    let mut errors = String::new();
    let mut pipe = child.stderr.take().expect("a pipe");
    pipe.read_to_string(&mut errors).expect("UTF-8");
    assert!(errors.contains("ended before the engine had stopped"), "{errors}");
}
