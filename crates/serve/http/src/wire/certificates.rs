//! Certificates in PEM files: the server's own, and those of authorities that clients trust.

use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, anyhow, ensure};
use tokio_rustls::rustls::crypto::ring::default_provider;
use tokio_rustls::rustls::pki_types::CertificateDer;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::{ClientConfig, RootCertStore};
#[cfg(feature = "ureq")]
use ureq::tls::{Certificate, RootCerts, TlsConfig};

/// Largest accepted file, in bytes.
const MAX_FILE_BYTES: u64 = 1 << 20;

/// The authorities that a client trusts instead of the public ones: the flag `--cacert`, as in
/// curl.
#[derive(Clone, Debug)]
pub struct Authorities(Vec<CertificateDer<'static>>);

impl Authorities {
    /// Reads a PEM file with one or several certificates.
    ///
    /// # Errors
    /// If the file cannot be read, or if something in it cannot be an authority's certificate.
    pub fn read(path: &Path) -> anyhow::Result<Self> {
        let certificates = read(path).and_then(|text| parse_certificates(&text))?;
        let authorities = Self(certificates);
        authorities.roots()?;
        Ok(authorities)
    }

    fn roots(&self) -> anyhow::Result<RootCertStore> {
        let mut roots = RootCertStore::empty();
        for (index, certificate) in self.0.iter().enumerate() {
            let added = roots.add(certificate.clone());
            added.with_context(|| format!("certificate {} of the file", index + 1))?;
        }
        Ok(roots)
    }

    /// The settings of a client made with rustls.
    ///
    /// # Errors
    /// As [`Authorities::read`].
    pub fn client_config(&self) -> anyhow::Result<ClientConfig> {
        let config = ClientConfig::builder_with_provider(Arc::new(default_provider()))
            .with_safe_default_protocol_versions()
            .context("TLS")?;
        Ok(config.with_root_certificates(self.roots()?).with_no_client_auth())
    }

    /// The settings of a client made with ureq.
    #[cfg(feature = "ureq")]
    #[must_use]
    pub fn for_ureq(&self) -> TlsConfig {
        let certificates = self.0.iter().map(|der| Certificate::from_der(der).to_owned());
        let certificates: Vec<Certificate<'static>> = certificates.collect();
        TlsConfig::builder().root_certs(RootCerts::new_with_certs(&certificates)).build()
    }
}

/// Reads a PEM file.
///
/// # Errors
/// If the file cannot be read, or has more than 1 MiB.
pub fn read(path: &Path) -> anyhow::Result<Vec<u8>> {
    let mut text = Vec::new();
    let file = File::open(path).context("cannot open the file")?;
    file.take(MAX_FILE_BYTES + 1).read_to_end(&mut text).context("cannot read the file")?;
    ensure!(text.len() as u64 <= MAX_FILE_BYTES, "expected at most {MAX_FILE_BYTES} bytes");
    Ok(text)
}

/// The certificates of a PEM file, at least one.
///
/// # Errors
/// If the text has no certificate, or a malformed one.
pub fn parse_certificates(text: &[u8]) -> anyhow::Result<Vec<CertificateDer<'static>>> {
    let expected = "expected certificates in PEM form (BEGIN CERTIFICATE)";
    let chain: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(text).collect();
    let chain = chain.map_err(|error| anyhow!("{expected}: {error}"))?;
    ensure!(!chain.is_empty(), "{expected}, got none");
    Ok(chain)
}
