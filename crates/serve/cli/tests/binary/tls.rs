//! HTTPS with `--ssl-certfile` and `--ssl-keyfile`.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::Command;
use std::time::{Duration, Instant};

use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, CertifiedKey, IsCa, KeyPair,
    generate_simple_self_signed,
};
use serde_json::{Value, json};
use ureq::tls::{Certificate, RootCerts, TlsConfig};

use crate::support::{Server, TINY, fail, succeed};

/// Longest time that anything here may take.
const GUARD: Duration = Duration::from_secs(60);

/// A certificate of this machine and its key, in files.
struct Files {
    dir: tempfile::TempDir,
    pem: String,
}

impl Files {
    fn new() -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        let names = vec!["127.0.0.1".to_owned(), "localhost".to_owned()];
        let made = generate_simple_self_signed(names);
        let CertifiedKey { cert, signing_key } = made.expect("a certificate");
        std::fs::write(dir.path().join("cert.pem"), cert.pem()).expect("written");
        std::fs::write(dir.path().join("key.pem"), signing_key.serialize_pem()).expect("written");
        Self { dir, pem: cert.pem() }
    }

    fn path(&self, name: &str) -> String {
        self.dir.path().join(name).to_str().expect("UTF-8").to_owned()
    }

    /// A server with the certificate, and these arguments.
    fn serve(&self, args: &[&str]) -> Server {
        let (certificate, key) = (self.path("cert.pem"), self.path("key.pem"));
        let own = ["--ssl-certfile", &certificate, "--ssl-keyfile", &key];
        Server::start(TINY, &[&own[..], args].concat())
    }

    /// A client that trusts the certificate and no other.
    fn client(&self) -> ureq::Agent {
        let root = Certificate::from_pem(self.pem.as_bytes()).expect("a certificate");
        let tls = TlsConfig::builder().root_certs(RootCerts::new_with_certs(&[root])).build();
        let config = ureq::Agent::config_builder().tls_config(tls).timeout_global(Some(GUARD));
        ureq::Agent::new_with_config(config.build())
    }
}

/// Waits until the server has closed a connection.
fn read_to_end(mut stream: TcpStream) -> Vec<u8> {
    stream.set_read_timeout(Some(GUARD)).expect("a timeout");
    let mut bytes = Vec::new();
    match stream.read_to_end(&mut bytes) {
        Ok(_) => {}
        Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset, "{error}"),
    }
    bytes
}

/// Goal: a client that trusts the certificate is answered, whole and streamed, also by curl; one
/// that does not is not, and neither is plain HTTP.
#[test]
fn requests_are_answered_over_tls() {
    let files = Files::new();
    let server = files.serve(&[]);
    assert!(server.url("").starts_with("https://"));
    let client = files.client();
    let url = server.url("/v1/completions");
    let body = json!({"prompt": "x", "max_tokens": 4, "temperature": 0}).to_string();
    let ask = |body: &str| {
        let request = client.post(&url).header("content-type", "application/json");
        request.send(body).expect("a reply").body_mut().read_to_string().expect("text")
    };
    let reply: Value = serde_json::from_str(&ask(&body)).expect("JSON");
    assert_eq!(reply["usage"]["completion_tokens"], 4, "{reply}");
    let streamed = ask(&body.replace("\"prompt\"", "\"stream\": true, \"prompt\""));
    assert!(streamed.trim_end().ends_with("data: [DONE]"), "{streamed}");
    // The operator's routes know the peer.
    assert!(client.get(server.url("/v1/cache/stats")).call().is_ok());
    let curl = Command::new("curl")
        .args(["--silent", "--cacert", &files.path("cert.pem"), &server.url("/health")])
        .output()
        .expect("curl runs");
    assert_eq!(String::from_utf8_lossy(&curl.stdout), "{\"status\":\"ok\"}");
    let other = Files::new().client().get(server.url("/health")).call();
    assert!(other.is_err(), "another certificate is trusted");
    let mut plain = TcpStream::connect(server.address()).expect("a connection");
    plain.write_all(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n").expect("sent");
    assert!(!read_to_end(plain).starts_with(b"HTTP"), "plain HTTP is answered");
}

/// Goal: a client that does not finish its handshake is disconnected in time, and makes room for
/// others before that.
#[test]
fn slow_handshakes_are_bounded() {
    let files = Files::new();
    let server = files.serve(&["--header-timeout", "2", "--max-connections", "3"]);
    let begin = |bytes: &[u8]| {
        let mut stream = TcpStream::connect(server.address()).expect("a connection");
        stream.write_all(bytes).expect("sent");
        stream
    };
    read_to_end(begin(&[]));
    read_to_end(begin(&[22, 3, 1, 1, 0, 1]));
    let started = Instant::now();
    let server = files.serve(&["--header-timeout", "1000", "--max-connections", "3"]);
    let held: Vec<TcpStream> =
        (0..3).map(|_| TcpStream::connect(server.address()).expect("a connection")).collect();
    assert!(files.client().get(server.url("/health")).call().is_ok());
    assert!(started.elapsed() < GUARD, "the idle connections were waited for");
    drop(held);
}

/// Goal: a stop lets a running answer finish, and does not wait for handshakes.
#[test]
fn a_stop_finishes_answers_over_tls() {
    let files = Files::new();
    let server = files.serve(&["--shutdown-timeout", "3000", "--header-timeout", "3000"]);
    let _lazy = TcpStream::connect(server.address()).expect("a connection");
    let body = json!({"prompt": "last words", "max_tokens": 1000, "ignore_eos": true,
                      "temperature": 0, "stream": true});
    let request = files.client().post(server.url("/v1/completions"));
    let request = request.header("content-type", "application/json");
    let mut reply = request.send(body.to_string()).expect("a reply");
    let mut reader = reply.body_mut().as_reader();
    let mut text = vec![0; 16];
    reader.read_exact(&mut text).expect("the beginning");
    server.terminate();
    reader.read_to_end(&mut text).expect("the rest");
    let text = String::from_utf8_lossy(&text);
    assert!(text.trim_end().ends_with("data: [DONE]"), "the stream was cut: {text}");
    drop(reply);
    assert!(server.wait().success());
}

/// Goal: files that cannot be used are refused at the start, with what was expected, and without
/// showing the key.
#[test]
fn wrong_files_are_refused() {
    let (files, others) = (Files::new(), Files::new());
    let key = std::fs::read_to_string(files.path("key.pem")).expect("a key");
    let write = |name: &str, text: &str| {
        std::fs::write(files.path(name), text).expect("written");
        files.path(name)
    };
    let refused = |certificate: &str, key: &str| {
        fail(&["serve", "--model", TINY, "--ssl-certfile", certificate, "--ssl-keyfile", key])
    };
    let (good, good_key) = (files.path("cert.pem"), files.path("key.pem"));
    let encrypted = key.replace("BEGIN PRIVATE", "BEGIN ENCRYPTED PRIVATE");
    let encrypted = encrypted.replace("END PRIVATE", "END ENCRYPTED PRIVATE");
    for (certificate, private, words) in [
        (files.path("none"), good_key.clone(), ["--ssl-certfile", "cannot open"]),
        (good.clone(), files.path("none"), ["--ssl-keyfile", "cannot open"]),
        (write("empty", ""), good_key.clone(), ["--ssl-certfile", "PEM"]),
        (good_key.clone(), good_key.clone(), ["--ssl-certfile", "BEGIN CERTIFICATE"]),
        (good.clone(), good.clone(), ["--ssl-keyfile", "BEGIN PRIVATE KEY"]),
        (good.clone(), write("locked", &encrypted), ["--ssl-keyfile", "encrypted"]),
        (good.clone(), others.path("key.pem"), ["cannot be used", "key"]),
    ] {
        let error = refused(&certificate, &private);
        for word in words {
            assert!(error.contains(word), "expected `{word}`: {error}");
        }
        assert!(!error.contains(&key[40..60]), "{error}");
    }
    let error = fail(&["serve", "--ssl-certfile", &good]);
    assert!(error.contains("--ssl-keyfile"), "{error}");
}

/// Goal: the commands that talk to a server trust a private authority that they are given, and no
/// other; errors say what to do.
#[test]
fn commands_trust_a_private_authority() {
    let files = Files::new();
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let key = || KeyPair::generate().expect("a key");
    let authority = CertifiedIssuer::self_signed(params, key()).expect("an authority");
    let own_key = key();
    let params = CertificateParams::new(vec!["127.0.0.1".to_owned()]).expect("a name");
    let own = params.signed_by(&own_key, &authority).expect("a certificate");
    for (name, text) in [
        ("cert.pem", own.pem()),
        ("key.pem", own_key.serialize_pem()),
        ("authority.pem", authority.pem()),
        // A file may have several, with text between them.
        ("two.pem", format!("one\n{}two\n{}", files.pem, authority.pem())),
        ("other.pem", files.pem.clone()),
        ("broken.pem", files.pem.replace("MII", "MIJ")),
        ("empty.pem", String::new()),
    ] {
        std::fs::write(files.path(name), text).expect("written");
    }
    let server = files.serve(&[]);
    let url = server.url("");
    let kv = files.path("exported.kv");
    let ids = ["7"; 40].join(",");
    let bench = ["bench", "serve", "--num-prompts", "2", "--random-output-len", "2"];
    let commands: [Vec<&str>; 3] = [
        vec!["cache", "warm", "a prompt of more than sixteen tokens", "--url", &url],
        vec!["cache", "export", &kv, "--token-ids", &ids, "--url", &url],
        [&bench[..], &["--base-url", &url]].concat(),
    ];
    let with = |command: &[&str], name: &str| {
        let path = files.path(name);
        [command, &["--cacert", &path]].concat().into_iter().map(str::to_owned).collect()
    };
    for command in &commands {
        for name in ["authority.pem", "two.pem"] {
            let args: Vec<String> = with(command, name);
            succeed(&args.iter().map(String::as_str).collect::<Vec<_>>());
        }
        let untrusted: Vec<String> = with(command, "other.pem");
        let plain: Vec<String> = command.iter().map(|&arg| arg.to_owned()).collect();
        for args in [untrusted, plain] {
            let error = fail(&args.iter().map(String::as_str).collect::<Vec<_>>());
            assert!(error.contains("certificate") && error.contains("--cacert"), "{error}");
        }
        for (name, word) in [
            ("none.pem", "cannot open"),
            ("empty.pem", "BEGIN CERTIFICATE"),
            ("broken.pem", "certificate"),
        ] {
            let args: Vec<String> = with(command, name);
            let error = fail(&args.iter().map(String::as_str).collect::<Vec<_>>());
            assert!(error.contains("--cacert") && error.contains(name), "{error}");
            assert!(error.contains(word), "expected `{word}`: {error}");
        }
    }
}

/// Goal: after SIGHUP, new connections get the certificate that the files have now.
#[cfg(unix)]
#[test]
fn certificates_are_read_again_on_sighup() {
    let (old, new) = (Files::new(), Files::new());
    let server = old.serve(&[]);
    let url = server.url("/health");
    assert!(old.client().get(&url).call().is_ok());
    assert!(new.client().get(&url).call().is_err());
    for name in ["cert.pem", "key.pem"] {
        std::fs::copy(new.path(name), old.path(name)).expect("copied");
    }
    server.hang_up();
    let since = Instant::now();
    while new.client().get(&url).call().is_err() {
        assert!(since.elapsed() < GUARD, "the new certificate is in use");
    }
    assert!(old.client().get(&url).call().is_err());
}
