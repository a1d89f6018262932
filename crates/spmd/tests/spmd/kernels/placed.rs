//! Kernels in steps with placements, for functions left in one piece by the cuts.

use std::collections::BTreeMap;

use burn::module::Module;
use burn::tensor::{Device, Tensor};
use burn_fsdp_certificate::compile;
use burn_fsdp_collectives::{LaunchConfig, ProcessGroup, launch};
use burn_fsdp_mesh::Placement::Shard;
use burn_fsdp_spmd::passes::schedule::Options;
use burn_fsdp_spmd::{Batch, Error, Expand, Mode};

use super::{Translator, pairs};
use crate::compiled::seeded;
use crate::eager::{self, adamw};
use crate::models::{Gpt, tokens};
use crate::placement::{STEPS, assert_close, mesh, tensor_parallel, trained};

const ROWS: usize = 4;
const AXES: [&[(&str, usize)]; 3] = [
    &[("data", 2), ("model", 1)],
    &[("data", 1), ("model", 3)],
    &[("data", 4), ("model", 1)],
];

/// A model, and its loss of a batch.
type Trained<M, B> = (fn(&Device) -> M, fn(&M, B) -> Tensor<1>);

/// Counts each kernel in the step of a rank.
fn kernels_of<M: Module + 'static, B: Batch>(
    axes: &'static [(&'static str, usize)],
    expand: Expand,
    (init, loss): Trained<M, B>,
    part: fn(usize, usize, usize, &Device) -> B,
) -> BTreeMap<String, usize> {
    let body = move |world: ProcessGroup| -> Result<_, Error> {
        let mode = Mode::expand(mesh(&world, axes)?, expand.clone());
        let mode = mode.options(Options::default().fuse(false)).certified();
        let mut step = compile(init, loss, adamw().build(), mode)?;
        step.step(1e-2, &part(0, 0, ROWS / axes[0].1, &Device::flex()))?;
        let mut names = BTreeMap::new();
        let nodes = step.graph().unwrap().nodes();
        for name in nodes.iter().map(|node| node.name()) {
            if let Some(name) = name.strip_prefix("Custom.models.") {
                *names.entry(name.to_owned()).or_insert(0) += 1;
            }
        }
        Ok(names)
    };
    let num_ranks = axes.iter().map(|axis| axis.1).product();
    let mut names = launch(LaunchConfig::new(num_ranks), body).unwrap();
    names.swap_remove(0)
}

/// Trains with placements, compared with Burn on the joined batch. Returns the kernels of each mesh.
fn check<M: Module + 'static, B: Batch>(
    expand: &Expand,
    model: Trained<M, B>,
    part: fn(usize, usize, usize, &Device) -> B,
) -> Vec<BTreeMap<String, usize>> {
    let (init, loss) = model;
    let batch = |step: usize, device: &Device| part(step, 0, ROWS, device);
    let expected = eager::train(init, loss, batch, STEPS, |_| 1e-2, adamw().init());
    let on = |axes: &'static [(&'static str, usize)]| {
        let expand = expand.clone().input("**", "data", Shard(0));
        let (data, model_ranks) = (axes[0].1, axes[1].1);
        let of_mesh = expand.clone();
        let got = trained(
            data * model_ranks,
            move |world| Ok(Mode::expand(mesh(world, axes)?, of_mesh.clone())),
            init,
            loss,
            move |step, rank, device| {
                let rows = ROWS / data;
                part(step, rank / model_ranks * rows, rows, device)
            },
        );
        assert_close(&format!("{axes:?}"), &got, &expected);
        kernels_of(axes, expand, model, part)
    };
    AXES.into_iter().map(on).collect()
}

#[test]
fn norms_and_attention_of_a_gpt_are_kernels_on_cut_heads_and_rows() {
    let _guard = seeded();
    // 3 heads, one for each of 3 ranks.
    for kernels in check(&tensor_parallel(), (Gpt::new, Gpt::loss), tokens) {
        assert_eq!(kernels["layer_norm"], 7, "{kernels:?}");
        assert_eq!(kernels["layer_norm_backward"], 7, "{kernels:?}");
        assert_eq!(kernels["attention"], 3, "{kernels:?}");
        assert_eq!(kernels["attention_backward"], 3, "{kernels:?}");
        assert_eq!(kernels["gelu"], 3, "{kernels:?}");
        assert!(kernels["matmul"] > 12, "{kernels:?}");
    }
}

#[test]
fn encoders_and_decoders_have_their_kernels_by_placements() {
    let _guard = seeded();
    let expand = Expand::new()
        .parameter("**.pwff.linear_inner.weight", "model", Shard(1))
        .parameter("**.pwff.linear_inner.bias", "model", Shard(0))
        .parameter("**.pwff.linear_outer.weight", "model", Shard(0))
        .parameter("encoder.**.query.weight", "model", Shard(1))
        .parameter("encoder.**.key.weight", "model", Shard(1))
        .parameter("encoder.**.value.weight", "model", Shard(1));
    for kernels in check(&expand, (Translator::new, Translator::loss), pairs) {
        assert_eq!(kernels["attention"], 4, "{kernels:?}");
        assert_eq!(kernels["attention_backward"], 4, "{kernels:?}");
        assert_eq!(kernels["layer_norm"], 6, "{kernels:?}");
        assert_eq!(kernels["log_softmax"], 1, "{kernels:?}");
    }
}
