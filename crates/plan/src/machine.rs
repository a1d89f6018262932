//! The machine that runs the ranks.

use serde::Serialize;

/// A connection, as seen from one end.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Link {
    /// Bytes per second in one direction.
    pub bandwidth: f64,
    /// Seconds until the first byte arrives.
    pub latency: f64,
}

/// A cluster of equal nodes with equal devices, with one rank per device.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Machine {
    /// Name of the machine.
    pub name: String,
    /// Operations per second of one device in 16-bit matrix products, according to its data sheet.
    pub peak_flops_16: f64,
    /// Operations per second of one device in 32-bit matrix products, according to its data sheet.
    pub peak_flops_32: f64,
    /// Fraction of peak throughput that train steps reach while they compute, `0..=1`.
    pub achievable: f64,
    /// Bytes per second of one device's memory.
    pub memory_bandwidth: f64,
    /// Size of one device's memory in bytes.
    pub memory_bytes: u64,
    /// Number of devices per node.
    pub ranks_per_node: usize,
    /// The link between devices of one node, per device.
    pub within: Link,
    /// The link between nodes, per node. The node's devices share it.
    pub between: Link,
    /// The link between a device and the memory of its host, per device.
    pub host: Link,
    /// One device's share of its host's memory bandwidth, in bytes per second.
    pub host_bandwidth: f64,
}

/// The achievable fraction of A100 devices, fitted to one published point: GPT-175B, one sequence per GPU, 173
/// TFLOP/s per GPU (arXiv 2304.11277, section 5.4).
pub(super) const A100_ACHIEVABLE: f64 = 0.5553;
/// The achievable fraction of H100 devices, fitted to one published point: Llama 2 7B on 96 GPUs with 800 Gb/s per
/// node and no activation checkpointing, 7500 tokens/s per GPU (IBM and PyTorch, "Maximizing training throughput
/// using PyTorch FSDP").
pub(super) const H100_ACHIEVABLE: f64 = 0.3529;

impl Machine {
    /// The names that [`named`](Self::named) accepts.
    pub const NAMES: [&'static str; 4] = ["a100-80g", "a100-40g", "h100", "cpu"];

    /// Returns the machine with this name, or `None` for an unknown name.
    pub fn named(name: &str) -> Option<Self> {
        match name {
            "a100-80g" => Some(Self::a100_80g()),
            "a100-40g" => Some(Self::a100_40g()),
            "h100" => Some(Self::h100()),
            "cpu" => Some(Self::cpu()),
            _ => None,
        }
    }

    /// Returns nodes of eight 80 GB A100s with 2 Tb/s between nodes: the cluster of arXiv 2304.11277.
    pub fn a100_80g() -> Self {
        Self {
            name: "a100-80g".to_owned(),
            peak_flops_16: 312e12,
            peak_flops_32: 19.5e12,
            achievable: A100_ACHIEVABLE,
            memory_bandwidth: 2.0e12,
            memory_bytes: 80 << 30,
            ranks_per_node: 8,
            within: Link {
                bandwidth: 300e9,
                latency: 5e-6,
            },
            between: Link {
                bandwidth: 250e9,
                latency: 10e-6,
            },
            host: Link {
                bandwidth: 25e9,
                latency: 10e-6,
            },
            host_bandwidth: 25e9,
        }
    }

    /// Returns nodes of eight 40 GB A100s with 400 Gb/s between nodes: AWS `p4d.24xlarge`.
    pub fn a100_40g() -> Self {
        Self {
            name: "a100-40g".to_owned(),
            memory_bandwidth: 1.55e12,
            memory_bytes: 40 << 30,
            between: Link {
                bandwidth: 50e9,
                latency: 10e-6,
            },
            ..Self::a100_80g()
        }
    }

    /// Returns nodes of eight 96 GB H100s with 400 Gb/s per device between nodes.
    pub fn h100() -> Self {
        Self {
            name: "h100".to_owned(),
            peak_flops_16: 989e12,
            peak_flops_32: 67e12,
            achievable: H100_ACHIEVABLE,
            memory_bandwidth: 2.4e12,
            memory_bytes: 96_000_000_000,
            ranks_per_node: 8,
            within: Link {
                bandwidth: 450e9,
                latency: 5e-6,
            },
            between: Link {
                bandwidth: 400e9,
                latency: 10e-6,
            },
            host: Link {
                bandwidth: 50e9,
                latency: 10e-6,
            },
            host_bandwidth: 50e9,
        }
    }

    /// Returns two cores of an AVX-512 server, connected by its memory.
    pub fn cpu() -> Self {
        Self {
            name: "cpu".to_owned(),
            peak_flops_16: 100e9,
            peak_flops_32: 100e9,
            achievable: 0.5,
            memory_bandwidth: 10e9,
            memory_bytes: 8 << 30,
            ranks_per_node: 64,
            within: Link {
                bandwidth: 5e9,
                latency: 20e-6,
            },
            between: Link {
                bandwidth: 1e9,
                latency: 50e-6,
            },
            host: Link {
                bandwidth: 5e9,
                latency: 20e-6,
            },
            host_bandwidth: 10e9,
        }
    }

    /// Returns the floating-point operations per second that a device achieves on elements of this many bytes.
    pub fn flops(&self, element_size: usize) -> f64 {
        let peak = match element_size {
            0..=2 => self.peak_flops_16,
            _ => self.peak_flops_32,
        };
        peak * self.achievable
    }

    /// Returns the duration of an all-gather of `bytes` in total over `ranks` ranks, in seconds. A reduce-scatter of
    /// the same bytes takes equally long.
    ///
    /// The model is a ring: `(n - 1) (latency + bytes / n / bandwidth)` (Thakur, Rabenseifner, Gropp, "Optimization
    /// of collective communication operations in MPICH", 2005, section 4.1). Rings between the nodes at the node's
    /// bandwidth and within the nodes at the device's bandwidth run at the same time.
    pub fn gather_seconds(&self, bytes: f64, ranks: usize) -> f64 {
        let ring = |link: Link, members: usize, bytes: f64| match members {
            0 | 1 => 0.0,
            n => (n - 1) as f64 * (link.latency + bytes / n as f64 / link.bandwidth),
        };
        let local = ranks.min(self.ranks_per_node);
        let nodes = ranks.div_ceil(self.ranks_per_node.max(1));
        let within = ring(self.within, local, bytes);
        within.max(ring(self.between, nodes, bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_is_a_machine() {
        for name in Machine::NAMES {
            assert_eq!(Machine::named(name).unwrap().name, name);
        }
        assert!(Machine::named("abacus").is_none());
    }

    #[test]
    fn a_gather_takes_as_long_as_its_slowest_ring() {
        let machine = Machine::a100_80g();
        assert_eq!(machine.gather_seconds(1e9, 1), 0.0);
        let two = machine.gather_seconds(1e9, 2);
        assert!((two - (5e-6 + 0.5e9 / 300e9)).abs() < 1e-12);
        // Each of the sixteen nodes receives 15/16 of the bytes over its link.
        let many = machine.gather_seconds(1e12, 128);
        assert!((many - 15.0 * (10e-6 + 62.5e9 / 250e9)).abs() < 1e-9);
    }
}
