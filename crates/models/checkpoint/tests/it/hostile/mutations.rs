//! Random damage, with a fixed seed, to files of valid models.

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

use super::gguf::small;
use super::{MEMORY_MAX, run_within};

/// Values that are near limits.
const EDGES: [u64; 8] = [0, 1, 0xff, 1 << 31, u32::MAX as u64, 1 << 62, 1 << 63, u64::MAX];

/// Changes `bytes` in one to three places of the first `header` bytes.
pub(crate) fn damage(bytes: &mut Vec<u8>, header: usize, random: &mut SmallRng) {
    for _ in 0..random.random_range(1..=3) {
        let header = header.min(bytes.len()).max(1);
        let at = random.random_range(0..header);
        let length = random.random_range(1..=64).min(bytes.len() - at);
        match random.random_range(0..6) {
            0 => bytes[at] = random.random(),
            1 => bytes[at] ^= 1 << random.random_range(0..8),
            2 => bytes.truncate(at + 1),
            3 => {
                let edge = EDGES[random.random_range(0..EDGES.len())].to_le_bytes();
                bytes.splice(at..at + length.min(8), edge);
            }
            4 => {
                let copy = bytes[at..at + length].to_vec();
                let to = random.random_range(0..header);
                bytes.splice(to..to, copy);
            }
            _ => drop(bytes.drain(at..at + length)),
        }
    }
}

/// Goal: damaged files are errors, or models that run.
#[test]
fn damaged_files_do_no_harm() {
    let mut random = SmallRng::seed_from_u64(0x5704);
    let dir = tempfile::tempdir().unwrap();
    let fixture = stolon_fixtures::path("llama3");
    let read = |name: &str| std::fs::read(fixture.join(name)).unwrap();
    let (config, weights) = (read("config.json"), read("model.safetensors"));
    let gguf = small().bytes();
    let header = 8 + u64::from_le_bytes(weights[..8].try_into().unwrap()) as usize;
    for round in 0..900 {
        let (mut config, mut weights, mut gguf) = (config.clone(), weights.clone(), gguf.clone());
        match round % 3 {
            0 => damage(&mut config, usize::MAX, &mut random),
            1 => damage(&mut weights, header, &mut random),
            _ => damage(&mut gguf, 4000, &mut random),
        }
        if round % 3 == 2 {
            let path = dir.path().join("m.gguf");
            std::fs::write(&path, gguf).unwrap();
            let _ = run_within(&path, MEMORY_MAX);
        } else {
            std::fs::write(dir.path().join("config.json"), config).unwrap();
            std::fs::write(dir.path().join("model.safetensors"), weights).unwrap();
            let _ = run_within(dir.path(), MEMORY_MAX);
        }
    }
}
