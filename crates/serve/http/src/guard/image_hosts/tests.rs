use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener};

use super::*;

/// Looks up every name as the same address, which may be a private one.
#[derive(Debug)]
struct Fixed(SocketAddr);

impl Resolver for Fixed {
    fn resolve(&self, _: &Uri, _: &Config, _: NextTimeout) -> Result<ResolvedSocketAddrs, Error> {
        let mut addresses = self.empty();
        addresses.push(self.0);
        Ok(addresses)
    }
}

fn hosts(names: &[&str]) -> Vec<ImageHost> {
    names.iter().map(|name| name.parse().expect("a host")).collect()
}

/// A server that answers each path of a request with these bytes, and then keeps the connection open
/// for as long as the client does if it `stalls`.
fn server(answer: impl Fn(&str) -> (String, bool) + Send + 'static) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("an address");
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let Ok(mut stream) = stream else { return };
            let mut head = Vec::new();
            while !head.ends_with(b"\r\n\r\n") {
                let mut byte = [0];
                if stream.read(&mut byte).unwrap_or(0) == 0 {
                    break;
                }
                head.push(byte[0]);
            }
            let head = String::from_utf8_lossy(&head);
            let path = head.split(' ').nth(1).unwrap_or_default();
            let (bytes, stalls) = answer(path);
            let _ = stream.write_all(bytes.as_bytes());
            if stalls {
                let _ = stream.read(&mut [0]);
            }
        }
    });
    address
}

fn of_server(names: &[&str], answer: fn(&str) -> (String, bool)) -> ImageHosts {
    ImageHosts::with_resolver(hosts(names), Fixed(server(answer)))
}

fn fetch(hosts: &ImageHosts, url: &str) -> Result<Vec<u8>, String> {
    hosts.fetch_here(&hosts.agent(), url)
}

fn ok(body: &str) -> String {
    format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{body}", body.len())
}

fn moved(location: &str) -> String {
    format!("HTTP/1.1 302 Found\r\nLocation: {location}\r\nContent-Length: 0\r\n\r\n")
}

/// Goal: names, names below one, and ports are parsed; anything else is refused.
#[test]
fn hosts_are_parsed_and_admit_their_urls() {
    for (host, admitted, others) in [
        (
            "Images.example.com",
            vec!["https://images.example.com/a.png", "http://IMAGES.example.com:80/a"],
            vec![
                "https://example.com/a",
                "https://a.images.example.com/",
                "https://images.example.com:8443/",
                "https://images.example.com:80/",
                "https://images.example.com./a",
                "https://images.example.com.evil.test/",
            ],
        ),
        (
            "*.example.com",
            vec!["https://a.example.com/", "https://a.b.example.com/"],
            vec!["https://example.com/", "https://aexample.com/", "https://.example.com/"],
        ),
        (
            "example.com:8443",
            vec!["https://example.com:8443/", "http://example.com:8443/"],
            vec!["https://example.com/", "https://example.com:443/"],
        ),
    ] {
        let hosts = ImageHosts::new(hosts(&[host]));
        for url in admitted {
            assert!(hosts.admitted(url).is_ok(), "{host} {url}");
        }
        for url in others {
            assert!(hosts.admitted(url).is_err(), "{host} {url}");
        }
    }
    for text in
        ["", "*", "*.", "a*b", "*.*.example", "http://example.com", "a/b", "a:", "u@a", "a:b"]
    {
        let error = text.parse::<ImageHost>().expect_err(text);
        assert!(error.contains("expected a host") && error.contains(text), "{error}");
    }
}

/// Goal: URLs with another scheme, a user, or of an unreasonable length are refused.
#[test]
fn other_urls_are_refused() {
    let hosts = ImageHosts::new(hosts(&["example.com"]));
    let long = format!("https://example.com/{}", "a".repeat(URL_BYTES_MAX));
    for (url, expected) in [
        ("ftp://example.com/a", "an http or https URL"),
        ("https://user:secret@example.com/a", "without a user"),
        ("file:///etc/passwd", "an http or https URL"),
        ("example.com", "an http or https URL"),
        ("https://exa mple.com/", "an http or https URL"),
        ("http://example.com:65536/a", "a port from 1 to 65535"),
        ("http://example.com:0/a", "a port from 1 to 65535"),
        ("http://example.com:+80/a", "an http or https URL"),
        ("https://other.test/a", "a URL of a host that this server fetches images from"),
        (&long, "at most 4096 bytes"),
    ] {
        let error = fetch(&hosts, url).expect_err(url);
        assert!(error.contains(expected), "{url}: {error}");
    }
}

/// Goal: only addresses of the public internet are asked, in every form of an address.
#[test]
fn private_addresses_are_not_public() {
    let is_public = |text: &str| is_public(text.parse().expect(text));
    for public in ["8.8.8.8", "100.63.0.1", "172.32.0.1", "2606:4700::1111", "64:ff9b::808:808"] {
        assert!(is_public(public), "{public}");
    }
    for private in [
        "0.0.0.0",
        "10.0.0.1",
        "100.64.0.1",
        "127.0.0.1",
        "169.254.169.254",
        "172.16.0.1",
        "192.0.0.1",
        "192.0.2.1",
        "192.168.0.1",
        "198.18.0.1",
        "198.51.100.1",
        "203.0.113.1",
        "224.0.0.1",
        "240.0.0.1",
        "255.255.255.255",
        "::",
        "::1",
        "::ffff:127.0.0.1",
        "::ffff:10.0.0.1",
        "64:ff9b::7f00:1",
        "fc00::1",
        "fd12::1",
        "fe80::1",
        "ff02::1",
        "2001::1",
        "2001:db8::1",
        "2002:7f00:1::",
        "3fff::1",
    ] {
        assert!(!is_public(private), "{private}");
    }
    // This machine by name and by number: refused, although the operator has named the hosts.
    let hosts = ImageHosts::new(hosts(&["localhost", "127.0.0.1", "[::1]"]));
    for url in ["http://localhost/", "http://127.0.0.1/a.png", "http://[::1]/"] {
        let error = fetch(&hosts, url).expect_err(url);
        assert!(error.contains("expected a public address, got a private one"), "{error}");
    }
}

/// Goal: a file is fetched, also after redirects within the list; redirects to other hosts, to no
/// URL, and without end are refused.
#[test]
fn redirects_are_checked_like_the_first_url() {
    let hosts = of_server(&["a.test", "b.test"], |path| match path {
        "/picture" => (ok("pixels"), false),
        "/path" => (moved("/picture"), false),
        "/host" => (moved("http://b.test/picture"), false),
        "/other" => (moved("http://evil.test/picture"), false),
        "/private" => (moved("http://127.0.0.1/picture"), false),
        "/scheme" => (moved("ftp://a.test/picture"), false),
        "/network" => (moved("//evil.test/picture"), false),
        "/port" => (moved("http://a.test:65536/picture"), false),
        "/nowhere" => (moved(""), false),
        "/loop" => (moved("/loop"), false),
        _ => ("HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n".into(), false),
    });
    for path in ["picture", "path", "host"] {
        let file = fetch(&hosts, &format!("http://a.test/{path}"));
        assert_eq!(file.as_deref(), Ok(&b"pixels"[..]), "{path}");
    }
    for (path, expected) in [
        ("other", "a.test redirects: expected a URL of a host"),
        ("private", "a.test redirects: expected a URL of a host"),
        ("scheme", "a.test redirects: expected an http or https URL"),
        ("network", "a.test redirects: expected"),
        ("port", "a.test redirects: expected an http or https URL"),
        ("nowhere", "a.test redirects: expected an http or https URL"),
        ("loop", "expected at most 3 redirects"),
        ("missing", "expected status 200, got 404"),
    ] {
        let error = fetch(&hosts, &format!("http://a.test/{path}")).expect_err(path);
        assert!(error.contains(expected), "{path}: {error}");
    }
    let https = hosts.admitted("https://a.test/").expect("a URL");
    let error = hosts.redirected(&https, "http://b.test/").expect_err("not encrypted");
    assert!(error.contains("expected https, got http"), "{error}");
}

/// Goal: a fetch ends if its file is too large, whether announced or not, or does not arrive.
#[test]
fn size_and_time_are_bounded() {
    let mut hosts = of_server(&["a.test"], |path| match path {
        "/announced" => (ok(&"x".repeat(101)), false),
        "/endless" => (format!("HTTP/1.1 200 OK\r\n\r\n{}", "x".repeat(1000)), false),
        "/exact" => (ok(&"x".repeat(100)), false),
        "/half" => ("HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\nxx".into(), true),
        _ => (String::new(), true),
    });
    hosts.file_bytes_max = 100;
    assert_eq!(fetch(&hosts, "http://a.test/exact").map(|file| file.len()), Ok(100));
    for path in ["announced", "endless"] {
        let error = fetch(&hosts, &format!("http://a.test/{path}")).expect_err(path);
        assert!(error.contains("expected at most 100 bytes, got more"), "{error}");
    }
    hosts.time_max = Duration::from_millis(200);
    for path in ["half", "silent"] {
        let error = fetch(&hosts, &format!("http://a.test/{path}")).expect_err(path);
        assert!(error.contains("expected the file within 200ms"), "{error}");
    }
}

/// Goal: when a request ends, its connections to a slow host are closed, and the next request finds
/// the same number of permits.
#[tokio::test]
async fn a_fetch_ends_with_its_request() {
    const GUARD: Duration = Duration::from_secs(60);
    let (asked, asking) = std::sync::mpsc::channel();
    let (ended, ending) = std::sync::mpsc::channel();
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("an address");
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let (mut stream, asked, ended) = (stream.expect("one"), asked.clone(), ended.clone());
            std::thread::spawn(move || {
                let mut bytes = [0; 4096];
                assert!(stream.read(&mut bytes).expect("a request") > 0);
                stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nx").expect("sent");
                asked.send(()).expect("a test");
                let _ = ended.send(stream.read(&mut bytes).unwrap_or(0));
            });
        }
    });
    let mut hosts = ImageHosts::with_resolver(hosts(&["a.test"]), Fixed(address));
    hosts.time_max = Duration::from_secs(3600);
    let before = hosts.permits.available_permits();
    let fetching: Vec<_> =
        (0..3).map(|_| tokio::spawn(hosts.fetch("http://a.test/".into()))).collect();
    let waited = tokio::task::spawn_blocking(move || {
        (0..3).for_each(|_| asking.recv_timeout(GUARD).expect("a request"));
    });
    waited.await.expect("three requests");
    fetching.iter().for_each(tokio::task::JoinHandle::abort);
    let waited = tokio::task::spawn_blocking(move || {
        (0..3).for_each(|_| assert_eq!(ending.recv_timeout(GUARD), Ok(0), "closed"));
    });
    waited.await.expect("three ends");
    while hosts.permits.available_permits() < before {
        tokio::task::yield_now().await;
    }
}
