//! [`HubOptions`] has the address, token and cache of the hub, from the same environment variables
//! as in Hugging Face's own tools.

use std::path::{Path, PathBuf};
use std::time::Duration;

use super::ProgressCallback;
use crate::files;

/// The default of [`HubOptions::timeout`], as in Hugging Face's tools.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum size in bytes of the file with the token.
const TOKEN_BYTES_MAX: u64 = 4096;

/// Options of access to the hub and its cache.
#[derive(Clone)]
pub struct HubOptions {
    /// The cache directory, which contains the `models--org--name` directories.
    pub cache: PathBuf,
    /// The hub's URL, without a slash at the end.
    pub endpoint: String,
    /// The access token for private and gated repositories.
    pub token: Option<String>,
    /// Whether only the cache is used, and never the network.
    pub offline: bool,
    /// Maximum time to wait for a connection, for the headers of an answer, and for the next bytes
    /// of a file; above 0.
    pub timeout: Duration,
    /// A function that is called with the progress of each download. With `None`, progress is
    /// logged every five seconds.
    pub progress: Option<ProgressCallback>,
}

impl std::fmt::Debug for HubOptions {
    /// Formats the options without the token.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HubOptions")
            .field("cache", &self.cache)
            .field("endpoint", &self.endpoint)
            .field("token", &self.token.as_ref().map(|_| "..."))
            .field("offline", &self.offline)
            .field("timeout", &self.timeout)
            .field("progress", &self.progress)
            .finish()
    }
}

impl Default for HubOptions {
    /// Returns [`HubOptions::from_env`].
    fn default() -> Self {
        Self::from_env()
    }
}

impl HubOptions {
    /// Reads the options from the environment variables `HF_HOME` (or `HF_HUB_CACHE` for the cache
    /// only), `HF_TOKEN` (or the file that `HF_TOKEN_PATH` names, or the file `token` in
    /// `HF_HOME`), `HF_ENDPOINT`, `HF_HUB_OFFLINE` (1, on, yes or true), and
    /// `HF_HUB_DOWNLOAD_TIMEOUT` (seconds, 1 to 86,400; 10 by default).
    #[must_use]
    pub fn from_env() -> Self {
        Self::from_variables(|name| std::env::var(name).ok())
    }

    /// The same as [`HubOptions::from_env`], with the values of the variables from a function.
    #[must_use]
    pub fn from_variables(variable: impl Fn(&str) -> Option<String>) -> Self {
        let set = |name: &str| variable(name).filter(|value| !value.is_empty());
        let home = set("HF_HOME").map(PathBuf::from).unwrap_or_else(|| {
            let cache = set("XDG_CACHE_HOME").map(PathBuf::from).unwrap_or_else(|| {
                let user = set("HOME").or_else(|| set("USERPROFILE"));
                PathBuf::from(user.unwrap_or_else(|| ".".into())).join(".cache")
            });
            cache.join("huggingface")
        });
        let token_path = set("HF_TOKEN_PATH").map_or_else(|| home.join("token"), PathBuf::from);
        let endpoint = set("HF_ENDPOINT").unwrap_or_else(|| "https://huggingface.co".into());
        let on = |value: String| {
            matches!(value.to_ascii_lowercase().as_str(), "1" | "on" | "yes" | "true")
        };
        let timeout = set("HF_HUB_DOWNLOAD_TIMEOUT").and_then(|value| value.parse().ok());
        let timeout = timeout.filter(|n| (1..=86_400).contains(n)).map(Duration::from_secs);
        Self {
            cache: set("HF_HUB_CACHE").map_or_else(|| home.join("hub"), PathBuf::from),
            endpoint: endpoint.trim_end_matches('/').to_owned(),
            token: set("HF_TOKEN").map(|t| t.trim().to_owned()).or_else(|| token_in(&token_path)),
            offline: set("HF_HUB_OFFLINE").is_some_and(on),
            timeout: timeout.unwrap_or(TIMEOUT),
            progress: None,
        }
    }
}

/// Reads the token that a login with Hugging Face's tools has stored in the file `path`.
fn token_in(path: &Path) -> Option<String> {
    let token = String::from_utf8(files::read(path, TOKEN_BYTES_MAX).ok()?).ok()?;
    let token = token.trim();
    (!token.is_empty()).then(|| token.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(variables: &[(&str, &str)]) -> HubOptions {
        HubOptions::from_variables(|name| {
            let found = variables.iter().find(|(key, _)| *key == name);
            found.map(|(_, value)| (*value).to_owned())
        })
    }

    /// Goal: without variables, the public hub and the cache in the home directory are used.
    #[test]
    fn defaults_are_the_public_hub_and_the_home_directory() {
        let options = options(&[("HOME", "/home/me")]);
        assert_eq!(options.cache, Path::new("/home/me/.cache/huggingface/hub"));
        assert_eq!(options.endpoint, "https://huggingface.co");
        assert!(options.token.is_none() && !options.offline);
    }

    /// Goal: each variable has the effect that Hugging Face's tools document.
    #[test]
    fn variables_have_their_documented_effect() {
        let home = tempfile::tempdir().unwrap();
        std::fs::write(home.path().join("token"), " stored \n").unwrap();
        let home = home.path().to_str().unwrap();
        let given = options(&[("HF_HOME", home), ("HF_ENDPOINT", "http://localhost:9/")]);
        assert_eq!(given.cache, Path::new(home).join("hub"));
        assert_eq!(given.endpoint, "http://localhost:9");
        assert_eq!(given.token.as_deref(), Some("stored"));
        let given = options(&[("HF_HOME", home), ("HF_TOKEN", "t"), ("HF_HUB_CACHE", "/c")]);
        assert_eq!(given.cache, Path::new("/c"));
        assert_eq!(given.token.as_deref(), Some("t"));
        assert!(!format!("{given:?}").contains("\"t\""));
        for (value, seconds) in [("60", 60), ("0", 10), ("x", 10), ("99999999999999999999", 10)] {
            let timeout = options(&[("HF_HUB_DOWNLOAD_TIMEOUT", value)]).timeout;
            assert_eq!(timeout, Duration::from_secs(seconds), "{value}");
        }
        for (value, offline) in
            [("1", true), ("TRUE", true), ("Yes", true), ("0", false), ("", false)]
        {
            assert_eq!(options(&[("HF_HUB_OFFLINE", value)]).offline, offline, "{value}");
        }
    }
}
