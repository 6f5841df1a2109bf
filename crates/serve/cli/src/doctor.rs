//! `stolon doctor`: what this machine offers, and which models it can run.

use std::path::{Path, PathBuf};

use clap::Args;
use serde_json::{Value, json};
use stolon::{HubOptions, Machine};

use crate::memory::format_bytes;
use crate::terminal;

/// Size of the buffer whose reading is measured. The largest caches of a socket are smaller.
const BUFFER_BYTES: u64 = 1 << 30;
const PASSES: usize = 8;
/// Tokens of the context for which the table of models counts KV.
const CONTEXT: u64 = 8192;
/// Memory that the table leaves to activations, the tokenizer and the program.
const OVERHEAD: u64 = 512 << 20;
/// Share of the memory's rate that a token of one sequence reaches: measured on models of 0.5 to 1.5
/// GiB.
const REACHED: f64 = 0.75;

/// The size of a published model.
struct Size {
    name: &'static str,
    /// All parameters, and those that compute a token.
    parameters: f64,
    active: f64,
    /// Layers with KV, KV heads, and the size of a head.
    kv: [u64; 3],
}

/// Models that people download, by their configurations on the hub.
const SIZES: [Size; 8] = [
    Size { name: "Qwen3 0.6B", parameters: 0.60e9, active: 0.60e9, kv: [28, 8, 128] },
    Size { name: "Llama 3.2 1B", parameters: 1.24e9, active: 1.24e9, kv: [16, 8, 64] },
    Size { name: "Qwen3 1.7B", parameters: 1.72e9, active: 1.72e9, kv: [28, 8, 128] },
    Size { name: "Qwen3 4B", parameters: 4.02e9, active: 4.02e9, kv: [36, 8, 128] },
    Size { name: "Llama 3.1 8B", parameters: 8.03e9, active: 8.03e9, kv: [32, 8, 128] },
    Size { name: "Qwen3 14B", parameters: 14.8e9, active: 14.8e9, kv: [40, 8, 128] },
    Size { name: "gpt-oss 20B", parameters: 20.9e9, active: 3.6e9, kv: [24, 8, 64] },
    Size { name: "Qwen3 30B-A3B", parameters: 30.5e9, active: 3.3e9, kv: [48, 4, 128] },
];

/// Formats of weights and their bits per parameter, scales included.
const FORMATS: [(&str, f64); 3] = [("bf16", 16.0), ("Q8_0", 8.5), ("Q4_K", 4.85)];

/// Arguments of `stolon doctor`.
#[derive(Debug, Args)]
pub struct DoctorArgs {
    /// Do not measure the memory, which takes some seconds and 1 GiB
    #[arg(long)]
    quick: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// What was found.
struct Findings {
    machine: Machine,
    processor: Option<String>,
    huge_pages: Option<String>,
    /// The folder of downloaded models, and the free space of its disk.
    models: Option<(PathBuf, u64)>,
    /// Bytes per second.
    read_rate: Option<f64>,
}

impl DoctorArgs {
    /// Runs the command.
    ///
    /// # Errors
    /// `STOLON_CPU_PATH` names an instruction set that this machine does not have, or the output
    /// cannot be written.
    pub fn run(self) -> anyhow::Result<()> {
        let machine = Machine::this()?;
        let fits = machine.free_memory.is_none_or(|free| free > 2 * BUFFER_BYTES);
        let read_rate =
            (!self.quick && fits).then(|| machine.read_rate(BUFFER_BYTES as usize, PASSES));
        let folder = HubOptions::from_env().cache;
        let existing = folder.ancestors().find(|folder| folder.exists());
        let models = existing.and_then(free_space).map(|free| (folder.clone(), free));
        let found = Findings {
            machine,
            processor: processor(),
            huge_pages: huge_pages(),
            models,
            read_rate,
        };
        match self.json {
            true => terminal::line(found.to_json())?,
            false => found.print()?,
        }
        Ok(())
    }
}

impl Findings {
    fn to_json(&self) -> Value {
        let models = self.models.as_ref();
        json!({
            "processor": self.processor,
            "kernels": self.machine.kernels,
            "supported": self.machine.supported,
            "threads": self.machine.threads,
            "free_memory": self.machine.free_memory,
            "huge_pages": self.huge_pages,
            "models": models.map(|(folder, free)| json!({"folder": folder, "free": free})),
            "read_rate": self.read_rate,
        })
    }

    fn print(&self) -> anyhow::Result<()> {
        let Machine { kernels, supported, threads, free_memory, .. } = &self.machine;
        let unknown = || "unknown".to_owned();
        let mut lines = vec![
            ("processor", self.processor.clone().unwrap_or_else(unknown)),
            ("kernels", format!("{kernels} (supported: {})", supported.join(", "))),
            ("threads", threads.to_string()),
            ("free memory", free_memory.map_or_else(unknown, format_bytes)),
        ];
        if let Some(huge_pages) = &self.huge_pages {
            lines.push(("huge pages", huge_pages.clone()));
        }
        if let Some((folder, free)) = &self.models {
            lines.push(("models", format!("{}, {} free", folder.display(), format_bytes(*free))));
        }
        if let Some(rate) = self.read_rate {
            lines.push(("memory reads", format!("{}/s", format_bytes(rate as u64))));
        }
        for (name, value) in lines {
            terminal::line(format!("{name:<14}{value}"))?;
        }
        terminal::line(format!("\n{}", self.table().trim_end()))?;
        terminal::line(format!(
            "\nMemory with {CONTEXT} tokens of KV, and the tokens a second of one answer that the \
             memory allows;\n`-` does not fit. `stolon model inspect MODEL` computes it for one \
             model."
        ))?;
        if *kernels == "portable" {
            terminal::line(
                "\nThis processor has neither AVX2 nor NEON, so models run, but slowly.",
            )?;
        }
        Ok(())
    }

    /// Which models fit, and how fast one answer can be.
    fn table(&self) -> String {
        let mut rows = vec![vec!["model".to_owned()]];
        rows[0].extend(FORMATS.map(|(name, _)| name.to_owned()));
        for size in &SIZES {
            let mut row = vec![size.name.to_owned()];
            row.extend(FORMATS.map(|(_, bits)| self.cell(size, bits)));
            rows.push(row);
        }
        terminal::table(&rows)
    }

    fn cell(&self, size: &Size, bits: f64) -> String {
        let needed = needed(size, bits);
        if self.machine.free_memory.is_some_and(|free| needed > free) {
            return "-".to_owned();
        }
        let memory = format_bytes(needed);
        match self.read_rate {
            Some(rate) => {
                let tokens = REACHED * rate / (size.active * bits / 8.0);
                format!("{memory}, {tokens:.0}/s")
            }
            None => memory,
        }
    }
}

/// Bytes of the weights, of the KV of [`CONTEXT`] tokens in bf16, and of all else.
fn needed(size: &Size, bits: f64) -> u64 {
    let [layers, heads, head_size] = size.kv;
    let kv = CONTEXT * layers * heads * head_size * 2 * 2;
    (size.parameters * bits / 8.0) as u64 + kv + OVERHEAD
}

/// The processor's name, on Linux.
fn processor() -> Option<String> {
    let text = std::fs::read_to_string("/proc/cpuinfo").ok()?;
    let line = text.lines().find(|line| line.starts_with("model name"))?;
    Some(line.split_once(':')?.1.trim().to_owned())
}

/// Whether the system gives huge pages to large allocations, on Linux.
fn huge_pages() -> Option<String> {
    let text = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled").ok()?;
    let chosen = text.split_once('[')?.1.split_once(']')?.0;
    Some(match chosen {
        "never" => {
            "never (`madvise` would give them to weights and KV, which ask for them)".to_owned()
        }
        other => other.to_owned(),
    })
}

/// Free bytes of the disk with this folder.
#[cfg(unix)]
fn free_space(folder: &Path) -> Option<u64> {
    let disk = rustix::fs::statvfs(folder).ok()?;
    Some(disk.f_bavail.saturating_mul(disk.f_frsize))
}

#[cfg(not(unix))]
fn free_space(_: &Path) -> Option<u64> {
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: the memory of a known model is that of its weights and KV, and what does not fit has no
    /// figure.
    #[test]
    fn models_are_compared_with_the_memory() {
        let llama = SIZES.iter().find(|size| size.name == "Llama 3.1 8B").expect("it is listed");
        // 128 KiB of KV a token, as its configuration says.
        assert_eq!(needed(llama, 0.0), 8192 * (128 << 10) + OVERHEAD);
        let mut machine = Machine::this().expect("a supported instruction set");
        machine.free_memory = Some(10 << 30);
        let found = Findings {
            machine,
            processor: None,
            huge_pages: None,
            models: None,
            read_rate: Some(20e9),
        };
        assert_eq!(found.cell(llama, 16.0), "-");
        assert_eq!(found.cell(llama, 4.85), "6 GiB, 3/s");
    }
}
