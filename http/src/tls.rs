//! TLS: reads a certificate and its key.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, anyhow};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::crypto::ring::default_provider;
use tokio_rustls::rustls::pki_types::PrivateKeyDer;
use tokio_rustls::rustls::pki_types::pem::PemObject;

use crate::certificates::{parse_certificates, read};

/// What accepts TLS 1.2 and 1.3 connections with the certificates and the key of these PEM files.
/// The server's own certificate comes first, then those that link it to a known authority.
///
/// # Errors
/// If a file cannot be read or has no certificate or key, or if they do not belong together.
pub fn acceptor(certificates: &Path, key: &Path) -> anyhow::Result<TlsAcceptor> {
    let chain = read(certificates).and_then(|text| parse_certificates(&text));
    let chain = chain.with_context(|| format!("--ssl-certfile {}", certificates.display()))?;
    let private = read(key).and_then(|text| parse_key(&text));
    let private = private.with_context(|| format!("--ssl-keyfile {}", key.display()))?;
    let config = ServerConfig::builder_with_provider(Arc::new(default_provider()))
        .with_safe_default_protocol_versions()
        .context("TLS")?
        .with_no_client_auth()
        .with_single_cert(chain, private)
        .with_context(|| {
            let (certificates, key) = (certificates.display(), key.display());
            format!("the certificate in {certificates} and the key in {key} cannot be used")
        })?;
    let mut config = config;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(TlsAcceptor::from(Arc::new(config)))
}

/// Errors do not show the key.
fn parse_key(text: &[u8]) -> anyhow::Result<PrivateKeyDer<'static>> {
    PrivateKeyDer::from_pem_slice(text).map_err(|_| {
        let encrypted = text.windows(9).any(|window| window == b"ENCRYPTED");
        let got = if encrypted { "an encrypted one" } else { "none" };
        anyhow!(
            "expected a private key in PEM form without a password (BEGIN PRIVATE KEY), got {got}"
        )
    })
}
