//! Kernels in place of single operations of Burn: sums along a dim, and casts to halves and back.

use std::collections::BTreeMap;

use burn::module::{Module, Param};
use burn::nn::Initializer;
use burn::optim::SgdConfig;
use burn::tensor::{DType, Device, FloatDType, Tensor};
use burn_fsdp_collectives::{LaunchConfig, ProcessGroup, launch};
use burn_fsdp_spmd::Precision;
use burn_fsdp_spmd::passes::schedule::Options;
use burn_fsdp_spmd::{Error, Mode, Strategy, compile};

use crate::compiled::seeded;

/// Sizes of batches and parameters. None is a multiple of a processor's vector length.
#[derive(Debug, Clone, Copy)]
struct Sizes {
    rows: usize,
    columns: usize,
    depth: usize,
}

/// Below and above the size from which the kernel adds 32-bit floats.
const SIZES: [Sizes; 3] = [
    Sizes {
        rows: 3,
        columns: 7,
        depth: 5,
    },
    Sizes {
        rows: 1,
        columns: 33,
        depth: 1,
    },
    Sizes {
        rows: 41,
        columns: 67,
        depth: 37,
    },
];

/// Sums along the first and a middle dim, in forward and in backward.
#[derive(Module, Debug)]
struct Sums {
    scale: Param<Tensor<2>>,
    shift: Param<Tensor<1>>,
}

impl Sums {
    fn new(Sizes { columns, depth, .. }: Sizes, device: &Device) -> Self {
        let uniform = Initializer::Uniform {
            min: -1.0,
            max: 1.0,
        };
        Self {
            scale: uniform.init([columns, depth], device),
            shift: uniform.init([depth], device),
        }
    }

    /// The gradients of both parameters are sums over the rows.
    fn loss(&self, x: Tensor<3>) -> Tensor<1> {
        let x = x.cast(self.scale.val().dtype());
        let y = (x * self.scale.val().unsqueeze()).tanh() + self.shift.val().unsqueeze();
        let z = y.clone().sum_dim(1).cast(DType::F32);
        let w = y.sum_dim(0).cast(DType::F32);
        z.square().mean() + w.square().mean()
    }
}

fn rows(step: usize, rank: usize, of: Sizes, device: &Device) -> Tensor<3> {
    let len = (of.rows * of.columns * of.depth) as i64;
    let first = (step as i64 * 4 + rank as i64) * len;
    let x = Tensor::<1, burn::tensor::Int>::arange(first..first + len, device).float();
    (x * 0.37).sin().reshape([of.rows, of.columns, of.depth])
}

/// Losses, the bits of parameters by path, and the number of times that each operation is in the step.
type Trained = (
    Vec<f64>,
    BTreeMap<String, Vec<u32>>,
    BTreeMap<String, usize>,
);

fn trained(ranks: usize, of: Sizes, compute: Option<FloatDType>, kernels: bool) -> Trained {
    let body = move |world: ProcessGroup| -> Result<Trained, Error> {
        let device = Device::flex();
        let precision = compute.map_or_else(Precision::default, Precision::new);
        let options = Options::default().fuse(false).precision(precision);
        let mode = Mode::data_parallel(world.clone(), Strategy::FullShard);
        let mode = mode.options(options.kernels(kernels)).verified();
        let init = move |device: &Device| Sums::new(of, device);
        let mut step = compile(init, Sums::loss, SgdConfig::new().build(), mode)?;
        let mut losses = Vec::new();
        for index in 0..3 {
            losses.push(step.step(1e-2, &rows(index, world.rank(), of, &device))?);
        }
        let mut names: BTreeMap<String, usize> = BTreeMap::new();
        for node in step.graph().expect("it has run").nodes() {
            *names.entry(node.name().to_string()).or_default() += 1;
        }
        let mut parameters = BTreeMap::new();
        for path in ["scale", "shift"] {
            let values = step.parameter(path)?.try_to_vec::<f32>().expect("floats");
            let bits = values.into_iter().map(f32::to_bits).collect();
            parameters.insert(path.to_owned(), bits);
        }
        Ok((losses, parameters, names))
    };
    Device::flex().seed(1);
    let of_ranks = launch(LaunchConfig::new(ranks), body);
    of_ranks
        .unwrap_or_else(|error| panic!("{error}"))
        .swap_remove(0)
}

/// The numbers of the kernels for sums and for casts.
fn kernels(names: &BTreeMap<String, usize>) -> [usize; 2] {
    ["sum_dim", "cast"].map(|kernel| {
        let number = names.get(&format!("Custom.models.{kernel}"));
        number.copied().unwrap_or_default()
    })
}

#[test]
fn sums_and_casts_have_the_bits_of_the_operations_that_they_replace() {
    let _guard = seeded();
    for ranks in 1..=3 {
        for of in SIZES {
            for compute in [None, Some(FloatDType::BF16)] {
                let what = format!("{of:?} on {ranks} ranks in {compute:?}");
                let (losses, parameters, with) = trained(ranks, of, compute, true);
                let (want, want_parameters, without) = trained(ranks, of, compute, false);
                assert_eq!(losses, want, "{what}");
                assert_eq!(parameters, want_parameters, "{what}");
                // Burn's own functions stay for 32-bit sums of few elements.
                let is_half = compute.is_some();
                let is_large = of.rows * of.columns * of.depth >= 1 << 16;
                let [sums, casts] = kernels(&with);
                assert_eq!(sums > 0, is_half || is_large, "{what}: {with:?}");
                assert_eq!(casts > 0, is_half, "{what}: {with:?}");
                assert_eq!(kernels(&without), [0, 0], "{what}: {without:?}");
            }
        }
    }
}
