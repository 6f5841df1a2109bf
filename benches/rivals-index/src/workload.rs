//! The prompts: random tokens from a fixed seed.

/// Tokens per block.
pub const BLOCK: usize = 16;

/// Cached prompts, and queries of each kind.
pub struct Workload {
    /// The cached prompts.
    pub prompts: Vec<Vec<u32>>,
    /// Prompts that share their first blocks with cached prompts and differ afterward.
    pub partial: Vec<Vec<u32>>,
    /// Prompts that share nothing with the cached ones.
    pub miss: Vec<Vec<u32>>,
    /// Number of tokens that each partial prompt shares with a cached one.
    pub shared: usize,
    /// Names of the kinds of queries in the tables: full hit, partial hit, miss.
    pub names: [&'static str; 3],
}

pub struct Random(u64);

impl Random {
    pub fn token(&mut self) -> u32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 33) as u32 % 150_000
    }

    fn blocks(&mut self, count: usize) -> Vec<u32> {
        (0..count * BLOCK).map(|_| self.token()).collect()
    }
}

pub fn random() -> Random {
    Random(0x9e37_79b9_7f4a_7c15)
}

impl Workload {
    /// 200 prompts of 512 blocks that share their first 128.
    pub fn shared_prefix() -> Workload {
        let mut random = random();
        let system = random.blocks(128);
        let mut with_tail = || {
            let mut prompt = system.clone();
            prompt.extend(random.blocks(384));
            prompt
        };
        let prompts = (0..200).map(|_| with_tail()).collect();
        let partial = (0..200).map(|_| with_tail()).collect();
        let miss = (0..200).map(|_| random.blocks(512)).collect();
        let names = ["full 512 of 512", "partial 128 of 512", "miss"];
        Workload { prompts, partial, miss, shared: system.len(), names }
    }

    /// 10,000 prompts of 100 blocks that share nothing: a million blocks, and 10,000 children of
    /// the root.
    pub fn wide() -> Workload {
        let mut random = random();
        let prompts: Vec<Vec<u32>> = (0..10_000).map(|_| random.blocks(100)).collect();
        let mut diverging = |prompt: &Vec<u32>| {
            let tail = random.blocks(75);
            prompt.iter().copied().take(25 * BLOCK).chain(tail).collect()
        };
        let partial = prompts.iter().map(&mut diverging).collect();
        let miss = (0..10_000).map(|_| random.blocks(100)).collect();
        let names = ["full 100 of 100", "partial 25 of 100", "miss"];
        Workload { prompts, partial, miss, shared: 25 * BLOCK, names }
    }
}
