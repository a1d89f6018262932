//! Configurations that are named by their approximate number of parameters.

use crate::{GptConfig, LlamaConfig, LlamaVariant};

impl GptConfig {
    /// The names that [`preset`](Self::preset) accepts.
    pub const PRESETS: [&'static str; 5] = ["7b", "13b", "70b", "175b", "1t"];

    /// Returns the configuration with this name, or `None` for an unknown name.
    #[must_use]
    pub fn preset(name: &str) -> Option<Self> {
        match name {
            "7b" => Some(Self::gpt_7b()),
            "13b" => Some(Self::gpt_13b()),
            "70b" => Some(Self::gpt_70b()),
            "175b" => Some(Self::gpt_175b()),
            "1t" => Some(Self::gpt_1t()),
            _ => None,
        }
    }

    /// Returns the configuration with 6.9 billion parameters: GPT-3 6.7B (arXiv 2005.14165, table 2.1), with an
    /// untied head.
    #[must_use]
    pub fn gpt_7b() -> Self {
        gpt(32, 4096, 32)
    }

    /// Returns the configuration with 13.1 billion parameters: GPT-3 13B, its width of 5140 rounded to whole heads.
    #[must_use]
    pub fn gpt_13b() -> Self {
        gpt(40, 5120, 40)
    }

    /// Returns the configuration with 65.3 billion parameters: Chinchilla 70B (arXiv 2203.15556, table 4), which has
    /// more parameters for its positions.
    #[must_use]
    pub fn gpt_70b() -> Self {
        gpt(80, 8192, 64)
    }

    /// Returns the configuration with 175.2 billion parameters: GPT-3 175B, with an untied head.
    #[must_use]
    pub fn gpt_175b() -> Self {
        gpt(96, 12288, 96)
    }

    /// Returns the configuration with 1.01 trillion parameters: the largest model of arXiv 2104.04473, table 1.
    #[must_use]
    pub fn gpt_1t() -> Self {
        gpt(128, 25600, 160)
    }
}

fn gpt(layers: usize, dim: usize, heads: usize) -> GptConfig {
    GptConfig {
        layers,
        dim,
        heads,
        vocab: 50_257,
        seq: 2048,
    }
}

impl LlamaConfig {
    /// The names that [`preset`](Self::preset) accepts.
    pub const PRESETS: [&'static str; 7] = ["7b", "8b", "13b", "34b", "70b", "175b", "1t"];

    /// Returns the configuration with this name, or `None` for an unknown name.
    #[must_use]
    pub fn preset(name: &str) -> Option<Self> {
        match name {
            "7b" => Some(Self::llama_7b()),
            "8b" => Some(Self::llama_8b()),
            "13b" => Some(Self::llama_13b()),
            "34b" => Some(Self::llama_34b()),
            "70b" => Some(Self::llama_70b()),
            "175b" => Some(Self::llama_175b()),
            "1t" => Some(Self::llama_1t()),
            _ => None,
        }
    }

    /// Returns the configuration with 6.7 billion parameters: Llama 2 7B (arXiv 2307.09288).
    #[must_use]
    pub fn llama_7b() -> Self {
        llama(32, 4096, [32, 32], 11_008)
    }

    /// Returns the configuration with 8.0 billion parameters: Llama 3 8B (arXiv 2407.21783).
    #[must_use]
    pub fn llama_8b() -> Self {
        Self {
            vocab: 128_256,
            seq: 8192,
            rope_base: 500_000,
            ..llama(32, 4096, [32, 8], 14_336)
        }
    }

    /// Returns the configuration with 13.0 billion parameters: Llama 2 13B.
    #[must_use]
    pub fn llama_13b() -> Self {
        llama(40, 5120, [40, 40], 13_824)
    }

    /// Returns the configuration with 33.7 billion parameters: Llama 2 34B, with the sizes of Code Llama 34B (arXiv
    /// 2308.12950).
    #[must_use]
    pub fn llama_34b() -> Self {
        llama(48, 8192, [64, 8], 22_016)
    }

    /// Returns the configuration with 69.0 billion parameters: Llama 2 70B.
    #[must_use]
    pub fn llama_70b() -> Self {
        llama(80, 8192, [64, 8], 28_672)
    }

    /// Returns the configuration with 177.2 billion parameters: as deep and wide as GPT-3 175B, with the blocks of
    /// Llama 2 70B. No Llama of this size has been published.
    #[must_use]
    pub fn llama_175b() -> Self {
        llama(96, 12288, [96, 8], 40_960)
    }

    /// Returns the configuration with 1.00 trillion parameters: the depth and width of the GPT of this size, with Llama
    /// 2 70B's blocks. No Llama of this size has been published.
    #[must_use]
    pub fn llama_1t() -> Self {
        llama(128, 25600, [160, 8], 83_968)
    }
}

fn llama(layers: usize, dim: usize, [heads, kv_heads]: [usize; 2], hidden: usize) -> LlamaConfig {
    LlamaConfig {
        layers,
        dim,
        heads,
        kv_heads,
        hidden,
        vocab: 32_000,
        seq: 4096,
        rope_base: 10_000,
        variant: LlamaVariant::PLAIN,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn presets_have_the_published_numbers_of_parameters() {
        assert_eq!(LlamaConfig::llama_7b().num_params(), 6_738_415_616);
        assert_eq!(LlamaConfig::llama_8b().num_params(), 8_030_261_248);
        assert_eq!(LlamaConfig::llama_13b().num_params(), 13_015_864_320);
        assert_eq!(LlamaConfig::llama_70b().num_params(), 68_976_648_192);
        let billions = |params: usize| (params as f64 / 1e8).round() / 10.0;
        assert_eq!(billions(LlamaConfig::llama_34b().num_params()), 33.7);
        assert_eq!(billions(GptConfig::gpt_7b().num_params()), 6.9);
        assert_eq!(billions(GptConfig::gpt_13b().num_params()), 13.1);
        assert_eq!(billions(GptConfig::gpt_70b().num_params()), 65.3);
        assert_eq!(billions(LlamaConfig::llama_175b().num_params()), 177.2);
        assert_eq!(billions(LlamaConfig::llama_1t().num_params()), 1003.2);
        assert_eq!(billions(GptConfig::gpt_175b().num_params()), 175.2);
        assert_eq!(billions(GptConfig::gpt_1t().num_params()), 1009.3);
    }

    #[test]
    fn every_name_is_a_valid_configuration() {
        for name in GptConfig::PRESETS {
            GptConfig::preset(name).unwrap().validate().unwrap();
        }
        for name in LlamaConfig::PRESETS {
            LlamaConfig::preset(name).unwrap().validate().unwrap();
        }
        assert!(GptConfig::preset("8b").is_none() && LlamaConfig::preset("2t").is_none());
    }
}
