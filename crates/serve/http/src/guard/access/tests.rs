//! Tests of the checks of keys, addresses and origins.

use std::net::IpAddr;

use super::*;
use crate::guard::keys::{ApiKey, KeyLimits};

fn headers(pairs: &[(&'static str, &str)]) -> HeaderMap {
    let pair = |&(name, value): &(&'static str, &str)| {
        (HeaderName::from_static(name), value.parse().expect("a value"))
    };
    pairs.iter().map(pair).collect()
}

/// A TCP connection from this address.
fn peer(address: &str) -> Peer {
    let address: IpAddr = address.parse().expect("an address");
    Peer::Address((address, 1).into())
}

/// Goal: without a key, the administrator's routes are open to programs on this machine alone:
/// not to other machines, clients of a proxy, or web pages, rebound names included.
#[test]
fn admin_routes_without_a_key_are_local() {
    let access = Access::default();
    let check = |address: &str, pairs: &[(&'static str, &str)]| {
        access.check_admin(Some(peer(address)), &headers(pairs)).is_ok()
    };
    for host in ["127.0.0.1:8080", "localhost", "LOCALHOST:1", "[::1]:8080", "127.9.9.9"] {
        assert!(check("127.0.0.1", &[("host", host)]), "{host}");
    }
    let local = ("host", "127.0.0.1:8080");
    assert!(check("::ffff:127.0.0.1", &[local]) && check("::1", &[local]));
    assert!(check("127.0.0.1", &[local, ("origin", "http://127.0.0.1:8080")]));
    assert!(!check("192.0.2.7", &[local]));
    assert!(access.check_admin(None, &headers(&[local])).is_err());
    for host in ["rebound.example", "127.0.0.1.example", "0.0.0.0", "192.0.2.7:80", ""] {
        assert!(!check("127.0.0.1", &[("host", host)]), "{host}");
    }
    assert!(!check("127.0.0.1", &[]), "no host");
    for foreign in [
        ("origin", "https://evil.example"),
        ("origin", "http://127.0.0.1:9090"),
        ("origin", "null"),
        ("sec-fetch-site", "cross-site"),
        ("sec-fetch-site", "same-site"),
        ("x-forwarded-for", "203.0.113.9"),
        ("forwarded", "for=203.0.113.9"),
        ("via", "1.1 proxy"),
    ] {
        assert!(!check("127.0.0.1", &[local, foreign]), "{foreign:?}");
    }
}

/// Goal: without API keys, a web page whose name was rebound to this machine cannot use the model,
/// also if it sends the headers of a proxy. Requests for localhost, for an IP address or for a name
/// that the operator allows are accepted.
#[test]
fn rebound_pages_cannot_use_the_model() {
    let check = |access: &Access, address: &str, pairs: &[(&'static str, &str)]| {
        access.check_host(Some(peer(address)), &headers(pairs)).is_ok()
    };
    let mut access = Access::default();
    let rebound = ("host", "rebound.example:8080");
    let origin = ("origin", "http://rebound.example:8080");
    for of_page in [&[rebound][..], &[rebound, origin], &[origin], &[]] {
        assert!(!check(&access, "127.0.0.1", of_page) && !check(&access, "::1", of_page));
    }
    for name in FORWARDED {
        assert!(!check(&access, "127.0.0.1", &[rebound, origin, (name, "1")]), "{name}");
    }
    for host in ["localhost:8080", "127.0.0.1", "[::1]:80", "192.0.2.7"] {
        assert!(check(&access, "127.0.0.1", &[("host", host), origin]), "{host}");
    }
    assert!(check(&access, "192.0.2.7", &[rebound, origin]), "from another machine");
    assert!(access.check_host(None, &headers(&[rebound, origin])).is_ok());
    access.allowed_hosts = vec!["llm.example".parse().expect("a name")];
    for address in ["127.0.0.1", "192.0.2.7"] {
        assert!(check(&access, address, &[("host", "llm.example")]), "{address}");
        assert!(check(&access, address, &[("host", "10.0.0.1:8080")]), "{address}");
        assert!(!check(&access, address, &[rebound]), "{address}");
    }
    let proxied = headers(&[("host", "llm.example")]);
    assert!(access.check_admin(Some(peer("127.0.0.1")), &proxied).is_err(), "not for operators");
    let key =
        ApiKey { name: "a".to_owned(), key: "key".to_owned().into(), limits: KeyLimits::default() };
    access.api_keys = vec![key].into();
    assert!(check(&access, "127.0.0.1", &[rebound, origin]), "the key decides");
}

/// Goal: if there is no administrator's key, the user who runs the server may use the
/// administrator's routes through a Unix domain socket, with any host in the address. Other users,
/// clients of a proxy and web pages may not. For the model, the host of a web page does not matter.
#[test]
fn admin_routes_of_a_socket_belong_to_its_user() {
    let access = Access::default();
    let check = |is_operator: bool, pairs: &[(&'static str, &str)]| {
        let peer = Some(Peer::Program { uid: Some(7), is_operator });
        access.check_admin(peer, &headers(pairs)).is_ok()
    };
    for host in ["localhost", "stolon", "rebound.example"] {
        assert!(check(true, &[("host", host)]) && !check(false, &[("host", host)]), "{host}");
    }
    assert!(check(true, &[]));
    for foreign in [("origin", "https://evil.example"), ("x-forwarded-for", "203.0.113.9")] {
        assert!(!check(true, &[("host", "localhost"), foreign]), "{foreign:?}");
    }
    let peer = Some(Peer::Program { uid: None, is_operator: false });
    let page = headers(&[("host", "app.example"), ("origin", "https://app.example")]);
    assert!(access.check_host(peer, &page).is_ok());
    let access = Access { admin_key: Some(Secret::from("sesame".to_owned())), ..access };
    assert!(access.check_admin(peer, &headers(&[("authorization", "Bearer sesame")])).is_ok());
}

/// Goal: with a key, the key alone decides, except about web pages.
#[test]
fn admin_routes_with_a_key_need_the_key() {
    let access = Access { admin_key: Some(Secret::from("sesame".to_owned())), ..Access::default() };
    let check = |pairs: &[(&'static str, &str)]| {
        access.check_admin(Some(peer("192.0.2.7")), &headers(pairs)).is_ok()
    };
    let key = ("authorization", "Bearer sesame");
    assert!(check(&[key]) && check(&[("authorization", "bearer sesame"), ("via", "proxy")]));
    for wrong in ["Bearer sesam", "Bearer sesame1", "Bearer ", "Basic sesame", "sesame"] {
        assert!(!check(&[("authorization", wrong)]), "{wrong}");
    }
    assert!(!check(&[]) && !check(&[key, ("origin", "https://evil.example")]));
}

/// Goal: a client is known by its key, and no salt of a client leads to another client's prefixes.
#[test]
fn tenants_are_kept_apart() {
    let key = |name: &str, key: &str| ApiKey {
        name: name.to_owned(),
        key: key.to_owned().into(),
        limits: KeyLimits::default(),
    };
    let mut access = Access {
        api_keys: vec![key("a", "key-a"), key("ab", "key-ab")].into(),
        tenants: Tenants::ByKey,
        ..Access::default()
    };
    let tenant = |access: &Access, headers: &HeaderMap| {
        access.key(headers).and_then(|key| access.tenant(key.as_deref(), headers))
    };
    let salt = |access: &Access, header: (&'static str, &str), salt: Option<&str>| {
        tenant(access, &headers(&[header])).ok().and_then(|tenant| tenant.salt(salt))
    };
    let of_a = |s| salt(&access, ("authorization", "Bearer key-a"), s);
    let of_ab = |s| salt(&access, ("authorization", "Bearer key-ab"), s);
    assert_ne!(of_a(Some("bc")), of_ab(Some("c")));
    assert_ne!(of_a(None), of_ab(None));
    assert_ne!(of_a(Some("x")), of_a(Some("y")));
    assert!(tenant(&access, &headers(&[("authorization", "Bearer key-")])).is_err());
    access.api_keys.replace(Vec::new());
    access.tenants = Tenants::ByHeader(HeaderName::from_static("x-tenant"));
    assert_eq!(salt(&access, ("x-tenant", "t"), None).as_deref(), Some("1:t"));
    assert!(tenant(&access, &HeaderMap::new()).is_err(), "the header is required");
    access.tenants = Tenants::One;
    assert_eq!(salt(&access, ("x-tenant", "t"), Some("s")).as_deref(), Some("s"));
}

/// Goal: a header that decides about access is refused if it comes twice, whatever its values, on
/// routes of clients and of the operator. Other headers may come twice.
#[test]
fn repeated_headers_are_refused() {
    let tenant = HeaderName::from_static("x-tenant");
    let access = Access { tenants: Tenants::ByHeader(tenant), ..Access::default() };
    let local = Some(peer("127.0.0.1"));
    let once = [("host", "localhost"), ("x-tenant", "a")];
    let with = |name: &str, values: [&str; 2]| {
        let (name, mut headers) = (name.parse::<HeaderName>().expect("a name"), headers(&once));
        headers.remove(&name);
        for value in values {
            headers.append(&name, value.parse().expect("a value"));
        }
        headers
    };
    let refusals = |headers: &HeaderMap| {
        let client = access.caller(local, headers).err();
        [client, access.check_admin(local, headers).err()]
    };
    for name in SINGLE.iter().map(HeaderName::as_str).chain(["x-tenant"]) {
        for second in ["localhost", "other"] {
            for refusal in refusals(&with(name, ["localhost", second])) {
                let refusal = refusal.expect(name);
                assert_eq!(refusal.status(), StatusCode::BAD_REQUEST);
                let expected = format!("expected the header {name} once");
                assert!(refusal.message().contains(&expected), "{refusal:?}");
            }
        }
    }
    assert_eq!(refusals(&headers(&once)), [None, None]);
    assert_eq!(refusals(&with("accept", ["a", "b"])), [None, None]);
}
