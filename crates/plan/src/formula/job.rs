//! A decoder's training run, and formulas for its cost.

use serde::Serialize;

use super::transformer::Transformer;
use crate::category::Bytes;
use crate::machine::Machine;
use crate::traffic::Traffic;
use burn_fsdp_spmd::Strategy;
use burn_fsdp_spmd::graph::CollectiveKind;

/// Activation checkpointing: which forward results are recomputed in backward instead of being kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Checkpointing {
    /// Nothing is recomputed.
    None,
    /// Cheap results and every second matrix product of a block are recomputed.
    Selective,
    /// Blocks are recomputed from their inputs.
    Full,
}

/// The precision of gathered parameters and activations. Stored parameters, their gradients and the optimizer states
/// always have 32 bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Precision {
    /// 32 bits.
    F32,
    /// 16 bits.
    Bf16,
}

impl Precision {
    /// Returns the size of an element in bytes.
    pub fn size(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 => 2,
        }
    }
}

/// A fully specified training run with AdamW.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Job {
    /// The model.
    pub model: Transformer,
    /// Number of ranks, one per device.
    pub ranks: usize,
    /// Number of sequences per step on each rank.
    pub batch: usize,
    /// Number of tokens per sequence.
    pub seq: usize,
    /// Precision of gathered parameters and activations.
    pub precision: Precision,
    /// The sharding strategy, which also determines how long full parameters are kept.
    pub strategy: Strategy,
    /// Activation checkpointing of the blocks.
    pub checkpointing: Checkpointing,
    /// True if stored parameters, gradients and optimizer states are in host memory, where the optimizer runs.
    pub is_offloaded: bool,
    /// Number of units gathered ahead of their use.
    pub prefetch: usize,
}

/// Bytes per parameter: of the stored value, its gradient, and AdamW's two states.
const MASTER: f64 = 4.0;
const GRADIENT: f64 = 4.0;
const STATES: f64 = 8.0;

/// A moment of the step, and the memory in use then.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Stop {
    /// A description of the moment, such as `backward of block 3`.
    pub moment: String,
    /// Bytes of device memory at the moment.
    pub bytes: Bytes,
}

impl Job {
    /// Returns the number of tokens of a step on one rank.
    pub fn tokens(&self) -> f64 {
        self.batch as f64 * self.seq as f64
    }

    fn size(&self) -> f64 {
        self.precision.size() as f64
    }

    /// Returns the fraction of parameters, gradients and optimizer states that each rank stores.
    fn share(&self) -> f64 {
        match self.strategy {
            Strategy::NoShard => 1.0,
            _ => 1.0 / self.ranks as f64,
        }
    }

    /// Lists the bytes of device memory by category over the step, block by block.
    ///
    /// With sharding and without offload, `(4 + 8) P / N` bytes are always allocated for `P` parameters on `N` ranks,
    /// and gradients grow to `4 P / N` bytes during backward. The sum is the `16 P / N` of arXiv 1910.02054, section
    /// 3.1.
    ///
    /// Full parameters and gradients are counted as the eager engine allocates them. The root keeps both from its first
    /// use to its last. Blocks have full parameters while they are in use or prefetched, and full gradients while these
    /// are computed and reduced.
    pub fn timeline(&self) -> Vec<Stop> {
        let layers = self.model.layers;
        let part = |blocks: usize| blocks as f64 / layers as f64;
        let stop = |moment: String, bytes: Bytes| Stop { moment, bytes };
        let forward = (0..layers).map(|block| {
            let bytes = self.in_forward(part(block + 1));
            stop(format!("forward of block {block}"), bytes)
        });
        let backward = (0..layers).rev().map(|block| {
            let bytes = self.in_backward(part(block + 1));
            stop(format!("backward of block {block}"), bytes)
        });
        forward
            .chain([stop("the loss".to_owned(), self.at_loss())])
            .chain(backward)
            .chain([stop("the optimizer step".to_owned(), self.at_rest(1.0))])
            .collect()
    }

    /// Returns the moment of peak memory. If moments are equal, the optimizer step takes precedence, then the earliest.
    pub fn peak(&self) -> Stop {
        let mut peak = Stop {
            moment: "the optimizer step".to_owned(),
            bytes: self.at_rest(1.0),
        };
        for stop in self.timeline() {
            if stop.bytes.total() > peak.bytes.total() {
                peak = stop;
            }
        }
        peak
    }

    /// Returns the bytes of device memory at [`peak`](Self::peak).
    pub fn peak_bytes(&self) -> u64 {
        self.peak().bytes.total()
    }

    /// Returns the bytes of stored parameters and optimizer states, plus this fraction of the gradients.
    fn at_rest(&self, gradients: f64) -> Bytes {
        if self.is_offloaded {
            return Bytes::default();
        }
        let params = self.model.num_params() as f64 * self.share();
        Bytes {
            parameters: (MASTER * params) as u64,
            optimizer_state: (STATES * params) as u64,
            gradients: (GRADIENT * params * gradients) as u64,
            ..Bytes::default()
        }
    }

    /// Returns the bytes of the full parameters that exist at the same time.
    fn gathered(&self) -> f64 {
        let (root, block) = (
            self.model.root_params() as f64,
            self.model.block_params() as f64,
        );
        let all = self.model.num_params() as f64;
        match self.strategy {
            // The stored parameters are already full. Only computation in fewer bits needs copies.
            Strategy::NoShard if self.precision == Precision::F32 => 0.0,
            Strategy::NoShard | Strategy::ShardGradOp => self.size() * all,
            Strategy::FullShard => {
                let blocks = (1 + self.prefetch).min(self.model.layers) as f64;
                self.size() * (root + blocks * block)
            }
        }
    }

    /// Returns the bytes that the loss needs.
    ///
    /// In 32 bits, the models' cross entropy is one operation that needs the logits and their gradient. In 16 bits it
    /// consists of several operations. They need the logits and, in 32 bits, the log probabilities, their gradient and
    /// the logits' gradient, like PyTorch's `cross_entropy(logits.float(), ..)`.
    fn logits(&self) -> f64 {
        let bytes = match self.precision {
            Precision::F32 => 4.0 + 4.0,
            Precision::Bf16 => 2.0 + 3.0 * 4.0,
        };
        self.tokens() * self.model.vocab as f64 * bytes
    }

    /// Returns the bytes that all blocks keep from forward to backward, excluding recomputed results.
    fn kept(&self) -> f64 {
        let per_token = match self.checkpointing {
            Checkpointing::None => self.model.block_elements(),
            Checkpointing::Selective => self.model.selective_elements(),
            Checkpointing::Full => self.model.dim as f64,
        };
        self.tokens() * per_token * self.size() * self.model.layers as f64
    }

    /// Returns the bytes that one block recomputes.
    fn recomputed(&self) -> f64 {
        let kept = match self.checkpointing {
            Checkpointing::None => return 0.0,
            Checkpointing::Selective => self.model.selective_elements(),
            Checkpointing::Full => self.model.dim as f64,
        };
        self.tokens() * (self.model.block_elements() - kept) * self.size()
    }

    /// Returns the bytes allocated in forward, once this fraction of the blocks has run.
    fn in_forward(&self, done: f64) -> Bytes {
        let mut bytes = self.at_rest(0.0);
        bytes.full_parameters += self.gathered() as u64;
        bytes.activations += (self.kept() * done + self.recomputed()) as u64;
        bytes
    }

    fn at_loss(&self) -> Bytes {
        let mut bytes = self.at_rest(0.0);
        bytes.full_parameters += self.gathered() as u64;
        bytes.activations += self.kept() as u64;
        bytes.temporaries += self.logits() as u64;
        bytes
    }

    /// Returns the bytes allocated in backward, while this fraction of the blocks still keeps its activations.
    fn in_backward(&self, left: f64) -> Bytes {
        let full = if self.strategy == Strategy::NoShard {
            1.0
        } else {
            1.0 - left
        };
        let mut bytes = self.at_rest(full);
        bytes.full_parameters += self.gathered() as u64;
        let blocks = if self.prefetch == 0 { 1.0 } else { 2.0 };
        let block = self.model.block_params() as f64 * self.size();
        let root = self.model.root_params() as f64 * self.size();
        bytes.gradients += (root + blocks * block) as u64;
        bytes.activations += (self.kept() * left + self.recomputed()) as u64;
        // The gradients of the block's widest result and of the residual stream.
        let widest = (self.model.hidden + self.model.dim) as f64;
        bytes.temporaries += (self.tokens() * widest * self.size()) as u64;
        bytes
    }

    /// Returns the bytes of host memory that each rank needs for offloaded tensors.
    pub fn host_bytes(&self) -> u64 {
        if self.is_offloaded {
            ((MASTER + STATES + GRADIENT) * self.model.num_params() as f64 * self.share()) as u64
        } else {
            0
        }
    }

    /// Returns the floating-point operations that the model requires per step and rank: once for forward, and twice
    /// that for backward.
    pub fn model_flops(&self) -> f64 {
        let forward = self.model.block_flops(self.seq) + self.model.head_flops();
        3.0 * self.tokens() * forward
    }

    /// Returns the number of floating-point operations that one rank executes in a step. Checkpointing repeats all or
    /// half of the blocks' forward.
    pub fn hardware_flops(&self) -> f64 {
        let again = match self.checkpointing {
            Checkpointing::None => 0.0,
            Checkpointing::Selective => 0.5,
            Checkpointing::Full => 1.0,
        };
        self.model_flops() + again * self.tokens() * self.model.block_flops(self.seq)
    }

    /// Counts the collectives of a step. With full sharding, each unit is gathered in forward and (except the root) in
    /// backward, and its gradients are reduced: the `3 P` of arXiv 1910.02054, section 7.2.2.
    pub fn traffic(&self) -> Traffic {
        let mut traffic = Traffic::default();
        let size = self.precision.size() as u64;
        let blocks = (0..self.model.layers).map(|_| (self.model.block_params(), true));
        for (params, is_block) in blocks.chain([(self.model.root_params(), false)]) {
            let bytes = params * size;
            if self.strategy == Strategy::NoShard {
                traffic.add(CollectiveKind::AllReduce, bytes, self.ranks);
                continue;
            }
            traffic.add(CollectiveKind::AllGather, bytes, self.ranks);
            if is_block && self.strategy == Strategy::FullShard {
                traffic.add(CollectiveKind::AllGather, bytes, self.ranks);
            }
            traffic.add(CollectiveKind::ReduceScatter, bytes, self.ranks);
        }
        traffic
    }

    /// Estimates the duration of a step; see [`Duration`].
    pub fn duration(&self, machine: &Machine) -> Duration {
        let compute = self.hardware_flops() / machine.flops(self.precision.size());
        let forward = self.tokens() * (self.model.block_flops(self.seq) + self.model.head_flops());
        let forward = forward / machine.flops(self.precision.size());
        let backward = compute - forward;
        let (size, layers) = (self.size(), self.model.layers as f64);
        let gather = |params: u64| machine.gather_seconds(params as f64 * size, self.ranks);
        let (block, root) = (
            gather(self.model.block_params()),
            gather(self.model.root_params()),
        );
        let (in_forward, in_backward, alone) = match self.strategy {
            // The root's gather begins the step, and its reduction ends it.
            Strategy::FullShard => (layers * block, 2.0 * layers * block, 2.0 * root),
            Strategy::ShardGradOp => (layers * block, layers * block, 2.0 * root),
            Strategy::NoShard => (0.0, 2.0 * layers * block, 2.0 * root),
        };
        let hidden = self.prefetch > 0;
        let beside = |compute: f64, communication: f64| {
            if hidden {
                compute.max(communication)
            } else {
                compute + communication
            }
        };
        let offload = self.offload_seconds(machine);
        let optimizer = self.optimizer_seconds(machine);
        let forward_beside = beside(forward, in_forward.max(offload / 3.0));
        let backward_beside = beside(backward, in_backward.max(offload * 2.0 / 3.0));
        Duration {
            step: forward_beside + backward_beside + alone + optimizer,
            compute,
            communication: in_forward + in_backward + alone,
            host: offload,
            optimizer,
        }
    }

    /// Returns the duration of copies between host and device in seconds: the shards for both gathers, and the
    /// gradients.
    fn offload_seconds(&self, machine: &Machine) -> f64 {
        if !self.is_offloaded {
            return 0.0;
        }
        let params = self.model.num_params() as f64 * self.share();
        params * (2.0 * self.size() + GRADIENT) / machine.host.bandwidth
    }

    /// Returns the duration of the optimizer step in seconds. AdamW reads parameters, gradients and states, and writes
    /// all of them except gradients.
    fn optimizer_seconds(&self, machine: &Machine) -> f64 {
        let params = self.model.num_params() as f64 * self.share();
        let bytes = params * (2.0 * (MASTER + STATES) + GRADIENT);
        if self.is_offloaded {
            bytes / machine.host_bandwidth
        } else {
            bytes / machine.memory_bandwidth
        }
    }
}

/// An estimate of one step, in seconds.
///
/// Forward and backward each take as long as the longest of their arithmetic, collectives and host copies. Without
/// prefetching, they take as long as the arithmetic plus the longer of the other two. The root's gather and reduction
/// and the optimizer step are added.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Duration {
    /// The whole step, from the batch to the new parameters.
    pub step: f64,
    /// Time of arithmetic operations.
    pub compute: f64,
    /// Time of collectives, whether or not they overlap with arithmetic.
    pub communication: f64,
    /// Time of copies between host and device, whether or not they overlap with arithmetic.
    pub host: f64,
    /// Time of the optimizer step.
    pub optimizer: f64,
}
