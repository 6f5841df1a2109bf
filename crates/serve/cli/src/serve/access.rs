//! Who may use the server: keys, limits and tenants, as flags of `stolon serve`.

use std::path::PathBuf;

use clap::Args;
use hyper::header::HeaderName;
use stolon_http::{
    Access, AllowedHost, ApiKey, KeyLimits, Origins, Secret, Tenants, check_key, read_keys,
};

use super::from_one;
use crate::text_file;

/// Keys, limits and tenants of clients, and the operator's key.
#[derive(Debug, Args)]
#[command(next_help_heading = "Access")]
pub(super) struct AccessArgs {
    /// Key that clients send as `Authorization: Bearer KEY`. Can be repeated
    ///
    /// Without any key, everybody may use /v1. Other programs on this machine can see a process's
    /// arguments: prefer the environment variable or --api-key-file.
    #[arg(long, value_name = "KEY", env = "STOLON_API_KEY", hide_env_values = true)]
    api_key: Vec<String>,
    /// File with API keys: a client's name and its key on each line. Lines that begin with # are
    /// comments
    ///
    /// The limits of a key may follow: `ada KEY max-running-tokens=8192 max-queued-tokens=65536`.
    /// The file is read again when the server receives SIGHUP.
    #[arg(long, value_name = "FILE")]
    pub(super) api_key_file: Option<PathBuf>,
    /// Maximum number of tokens of the running requests of one API key; further requests wait
    ///
    /// A request counts with the tokens of its prompt and the maximum number of tokens of its
    /// answers. Requests with other keys do not wait. Limits in the key file take precedence.
    #[arg(long, value_name = "TOKENS", value_parser = from_one())]
    key_max_running_tokens: Option<u64>,
    /// Maximum number of tokens of the waiting requests of one API key; further requests are
    /// refused with status 429
    #[arg(long, value_name = "TOKENS", value_parser = from_one())]
    #[arg(requires = "key_max_running_tokens")]
    key_max_queued_tokens: Option<u64>,
    /// Origin whose web pages may use the API from a browser (CORS), such as https://app.example,
    /// or `*` for all. Can be repeated, and can be a JSON list
    ///
    /// By default a browser lets no page of another origin read replies. The operator's routes are
    /// refused to pages of other origins in any case.
    #[arg(long, value_name = "ORIGIN")]
    pub(super) allowed_origins: Vec<Origins>,
    /// Name that may be in the address of requests to /v1 if there are no API keys, such as that of a
    /// reverse proxy, or `*` for all. Can be repeated
    ///
    /// By default, requests from this machine must be for localhost or an IP address, because the
    /// owner of a web page can let its domain name lead to this machine (DNS rebinding).
    /// Requests from other machines are checked only if this flag is given.
    #[arg(long, value_name = "HOST")]
    allowed_hosts: Vec<AllowedHost>,
    /// Key for the operator's routes /v1/cache, /admin and /metrics, sent as `Authorization: Bearer
    /// KEY`
    ///
    /// Without it, these routes can be used only from this machine.
    #[arg(long, value_name = "KEY", env = "STOLON_ADMIN_KEY", hide_env_values = true)]
    admin_key: Option<String>,
    /// Separate the cached prefixes of tenants: `key` by the name of the API key, `header:NAME` by
    /// a header that a reverse proxy sets
    ///
    /// Tenants can otherwise find out by the time to the first token, and by `cached_tokens`, what
    /// others have sent. Keys given with --api-key all have the name `default`. A request's own
    /// `cache_salt` separates prefixes within its tenant.
    #[arg(long, value_name = "SOURCE", value_parser = parse_tenants)]
    tenant_by: Option<Tenants>,
    /// The same as --tenant-by key
    #[arg(long, conflicts_with = "tenant_by")]
    isolate_tenants: bool,
    /// Leave the number of cached prompt tokens out of replies
    #[arg(long)]
    pub(super) hide_cached_tokens: bool,
    /// Let everybody who can reach the server read /metrics
    ///
    /// By default reading it needs the key given with --admin-key or, without one, access from this
    /// machine. Metrics say how many prompt tokens were cached, over all clients.
    #[arg(long)]
    pub(super) public_metrics: bool,
}

impl AccessArgs {
    /// The keys of the flags and of the file.
    pub(super) fn keys(&self) -> anyhow::Result<Vec<ApiKey>> {
        let limits = KeyLimits {
            running_tokens: self.key_max_running_tokens.map(|tokens| tokens as usize),
            queued_tokens: self.key_max_queued_tokens.map(|tokens| tokens as usize),
        };
        let mut api_keys = Vec::new();
        for key in &self.api_key {
            check_key(key).map_err(|message| anyhow::anyhow!("--api-key: {message}"))?;
            let (name, key) = ("default".to_owned(), Secret::from(key.clone()));
            api_keys.push(ApiKey { name, key, limits });
        }
        if let Some(path) = &self.api_key_file {
            let keys = text_file::announced(path.display(), || read_keys(path, limits));
            api_keys.extend(keys?);
        }
        Ok(api_keys)
    }

    /// The rules of access, with the keys of the flags and of the file.
    pub(super) fn read(&self) -> anyhow::Result<Access> {
        let api_keys = self.keys()?;
        if let Some(key) = &self.admin_key {
            check_key(key).map_err(|message| anyhow::anyhow!("--admin-key: {message}"))?;
        }
        let tenants = match self.isolate_tenants {
            true => Tenants::ByKey,
            false => self.tenant_by.clone().unwrap_or_default(),
        };
        anyhow::ensure!(
            tenants != Tenants::ByKey || !api_keys.is_empty(),
            "--tenant-by key: expected API keys (--api-key-file), got none"
        );
        let admin_key = self.admin_key.clone().map(Secret::from);
        let allowed_hosts = self.allowed_hosts.clone();
        Ok(Access { api_keys: api_keys.into(), admin_key, tenants, allowed_hosts })
    }
}

fn parse_tenants(text: &str) -> Result<Tenants, String> {
    let refused = || format!("expected `key` or `header:NAME`, got `{text}`");
    match text.strip_prefix("header:") {
        Some(name) => name.parse::<HeaderName>().map(Tenants::ByHeader).map_err(|_| refused()),
        None if text == "key" => Ok(Tenants::ByKey),
        None => Err(refused()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: the two sources of tenants are parsed, anything else is refused.
    #[test]
    fn sources_of_tenants_are_parsed() {
        assert_eq!(parse_tenants("key"), Ok(Tenants::ByKey));
        let header = HeaderName::from_static("x-tenant");
        assert_eq!(parse_tenants("header:X-Tenant"), Ok(Tenants::ByHeader(header)));
        for bad in ["", "keys", "header:", "header:a b"] {
            assert!(parse_tenants(bad).is_err_and(|message| message.contains("expected")), "{bad}");
        }
    }
}
