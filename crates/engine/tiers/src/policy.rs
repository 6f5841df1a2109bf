//! [`WritePolicy`] and [`PrefetchPolicy`]: when KV is written to the tiers, and how long a request
//! waits for KV that is read from them.

use std::fmt;
use std::num::NonZero;
use std::str::FromStr;
use std::time::Duration;

/// When computed KV is written to the disk, and uploaded to the object store behind it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum WritePolicy {
    /// As soon as it is computed.
    #[default]
    WriteThrough,
    /// When this many requests have begun with it, after the one that computed it. KV that only one
    /// request needs is not written.
    WriteThroughSelective {
        /// Number of later requests.
        hits: NonZero<u32>,
    },
    /// When it is evicted from the pool, and when the engine is stopped by `shutdown` or `drain`.
    /// If the process is killed, or the engine is dropped without a shutdown, the KV in the pool is
    /// lost.
    WriteBack,
}

/// How long a request waits for stored KV that is read for it. A request that was submitted and has
/// lost its cached prefix waits for at most 10 seconds, under every policy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum PrefetchPolicy {
    /// As long as that is expected to be faster than computing. KV that would be computed faster is
    /// not read.
    #[default]
    BestEffort,
    /// Until everything that is stored of its prompt is read, even if computing it is faster. This
    /// leaves the processor to other requests.
    WaitComplete,
    /// Like `BestEffort`, but waits at most this long. With 0, nothing is read.
    Timeout(Duration),
}

impl fmt::Display for WritePolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            WritePolicy::WriteThrough => f.write_str("write-through"),
            WritePolicy::WriteThroughSelective { hits } => {
                write!(f, "write-through-selective={hits}")
            }
            WritePolicy::WriteBack => f.write_str("write-back"),
        }
    }
}

impl FromStr for WritePolicy {
    type Err = String;

    /// `write-through`, `write-through-selective` (after one hit), `write-through-selective=HITS`
    /// or `write-back`. Underscores count as hyphens.
    fn from_str(text: &str) -> Result<WritePolicy, String> {
        let name = text.replace('_', "-");
        let (name, hits) = name.split_once('=').map_or((&name[..], None), |(n, h)| (n, Some(h)));
        match (name, hits) {
            ("write-through", None) => Ok(WritePolicy::WriteThrough),
            ("write-through-selective", hits) => {
                let hits = hits.unwrap_or("1").parse();
                let hits =
                    hits.map_err(|_| format!("expected hits of at least 1, got `{text}`"))?;
                Ok(WritePolicy::WriteThroughSelective { hits })
            }
            ("write-back", None) => Ok(WritePolicy::WriteBack),
            _ => Err(format!(
                "expected write-through, write-through-selective[=HITS] or write-back, got `{text}`"
            )),
        }
    }
}

impl fmt::Display for PrefetchPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PrefetchPolicy::BestEffort => f.write_str("best-effort"),
            PrefetchPolicy::WaitComplete => f.write_str("wait-complete"),
            PrefetchPolicy::Timeout(limit) => write!(f, "timeout={}", limit.as_millis()),
        }
    }
}

impl FromStr for PrefetchPolicy {
    type Err = String;

    /// `best-effort`, `wait-complete` or `timeout=MILLISECONDS`. Underscores count as hyphens.
    fn from_str(text: &str) -> Result<PrefetchPolicy, String> {
        match (&text.replace('_', "-")[..], text.strip_prefix("timeout=").map(u32::from_str)) {
            ("best-effort", _) => Ok(PrefetchPolicy::BestEffort),
            ("wait-complete", _) => Ok(PrefetchPolicy::WaitComplete),
            (_, Some(Ok(ms))) => Ok(PrefetchPolicy::Timeout(Duration::from_millis(ms.into()))),
            _ => Err(format!(
                "expected best-effort, wait-complete or timeout=MILLISECONDS, got `{text}`"
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn policies_are_printed_as_they_are_parsed() {
        for name in ["write-through", "write-through-selective=3", "write-back"] {
            assert_eq!(
                name.parse::<WritePolicy>().map(|policy| policy.to_string()),
                Ok(name.into())
            );
        }
        for name in ["best-effort", "wait-complete", "timeout=250"] {
            let parsed = name.parse::<PrefetchPolicy>();
            assert_eq!(parsed.map(|policy| policy.to_string()), Ok(name.into()));
        }
        assert_eq!("write_back".parse(), Ok(WritePolicy::WriteBack));
        let selective = "write_through_selective".parse::<WritePolicy>();
        assert_eq!(selective.map(|p| p.to_string()), Ok("write-through-selective=1".into()));
        for wrong in ["", "write-back=1", "write-through-selective=0", "write-through-selective="] {
            assert!(wrong.parse::<WritePolicy>().is_err(), "{wrong}");
        }
        for wrong in ["", "timeout", "timeout=", "timeout=-1", "best-effort=1"] {
            assert!(wrong.parse::<PrefetchPolicy>().is_err(), "{wrong}");
        }
    }
}
