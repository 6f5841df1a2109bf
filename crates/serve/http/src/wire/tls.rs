//! TLS: reads a certificate and its key when the server starts and when they are renewed.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, anyhow};
use arc_swap::ArcSwap;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::crypto::ring::default_provider;
use tokio_rustls::rustls::pki_types::PrivateKeyDer;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::server::{ClientHello, ResolvesServerCert};
use tokio_rustls::rustls::sign::CertifiedKey;

use crate::wire::certificates::{parse_certificates, read};

/// The certificate of a server, which can be replaced while the server runs. Clones share it.
#[derive(Clone, Debug)]
pub struct Certificate(Arc<ArcSwap<CertifiedKey>>);

impl Certificate {
    /// Reads PEM files. The server's own certificate comes first, then any intermediate
    /// certificates.
    ///
    /// # Errors
    /// If a file cannot be read or has no certificate or key, or if they do not belong together.
    pub fn read(certificates: &Path, key: &Path) -> anyhow::Result<Self> {
        Ok(Self(Arc::new(ArcSwap::from_pointee(certified(certificates, key)?))))
    }

    /// Reads the files again. New connections use the new content or, after an error, the old one.
    ///
    /// # Errors
    /// As [`Certificate::read`].
    pub fn renew(&self, certificates: &Path, key: &Path) -> anyhow::Result<()> {
        self.0.store(Arc::new(certified(certificates, key)?));
        Ok(())
    }

    /// The acceptor of TLS 1.2 and 1.3 connections with this certificate.
    ///
    /// # Errors
    /// If the versions are not available.
    pub fn acceptor(&self) -> anyhow::Result<TlsAcceptor> {
        let mut config = ServerConfig::builder_with_provider(Arc::new(default_provider()))
            .with_safe_default_protocol_versions()
            .context("TLS")?
            .with_no_client_auth()
            .with_cert_resolver(Arc::new(self.clone()));
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(TlsAcceptor::from(Arc::new(config)))
    }
}

impl ResolvesServerCert for Certificate {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.0.load_full())
    }
}

/// Reads a chain of certificates and the key of the first one.
fn certified(certificates: &Path, key: &Path) -> anyhow::Result<CertifiedKey> {
    let chain = read(certificates).and_then(|text| parse_certificates(&text));
    let chain = chain.with_context(|| format!("--ssl-certfile {}", certificates.display()))?;
    let private = read(key).and_then(|text| parse_key(&text));
    let private = private.with_context(|| format!("--ssl-keyfile {}", key.display()))?;
    CertifiedKey::from_der(chain, private, &default_provider()).with_context(|| {
        let (certificates, key) = (certificates.display(), key.display());
        format!("the certificate in {certificates} and the key in {key} cannot be used")
    })
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
