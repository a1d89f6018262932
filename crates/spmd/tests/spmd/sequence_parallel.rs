//! Activations that lie as their names ask, against one rank on the joined batch.

use burn::tensor::{Device, Tensor};
use burn_fsdp_collectives::{LaunchConfig, ProcessGroup, launch};
use burn_fsdp_mesh::Placement::{self, Partial, Replicate, Shard};
use burn_fsdp_mesh::ReduceOp;
use burn_fsdp_spmd::graph::Phase;
use burn_fsdp_spmd::{Batch, Error, Evaluation, Expand, Mode, compile, named_activation};

use crate::compiled::seeded;
use crate::eager::{self, adamw};
use crate::models::{Gpt, TIME, TokenBatch, tokens};
use crate::placement::{
    ROWS, STEPS, assert_close, counts, gpt, mesh, tensor_parallel, trained,
};

/// Tensor parallelism between the products of a block, and what is between two blocks cut along the tokens.
fn sequence_parallel() -> Expand {
    tensor_parallel().activation("residual", "model", Shard(1))
}

#[test]
fn blocks_with_the_tokens_cut_between_them_train_like_one_rank() {
    let _guard = seeded();
    let batch = |step, device: &Device| tokens(step, 0, ROWS, device);
    let expected = eager::train(Gpt::new, Gpt::loss, batch, STEPS, |_| 1e-2, adamw().init());
    for axes in [&[("model", 1)][..], &[("model", 2)], &[("model", 3)]] {
        let got = gpt(axes, sequence_parallel());
        assert_close(&format!("{axes:?}"), &got, &expected);
    }
    for axes in [
        &[("data", 2), ("model", 2)][..],
        &[("data", 1), ("model", 3)],
        &[("data", 3), ("model", 1)],
    ] {
        let expand = sequence_parallel().input("**", "data", Shard(0));
        assert_close(&format!("{axes:?}"), &gpt(axes, expand), &expected);
    }
    // Cut along the features, of which a norm needs all, and along the rows that no input is cut along.
    for cut in [Shard(0), Shard(2), Replicate] {
        let expand = tensor_parallel().activation("residual", "model", cut);
        let got = gpt(&[("model", 3)], expand);
        assert_close(&format!("residual {cut}"), &got, &expected);
    }
}

/// Shapes of the norms' inputs in forward, as far as they have three dims.
fn squared(expand: Expand) -> Vec<Vec<usize>> {
    let body = move |world: ProcessGroup| -> Result<_, Error> {
        let mode = Mode::expand(mesh(&world, &[("model", 2)])?, expand.clone());
        let mut step = compile(Gpt::new, Gpt::loss, adamw().build(), mode)?;
        step.step(1e-2, &tokens(0, 0, ROWS, &Device::flex()))?;
        let graph = step.graph().unwrap();
        let forward = graph.nodes().iter().filter(|node| node.phase == Phase::Forward);
        let means = forward.filter(|node| node.name().contains("MeanDim"));
        let shapes = means.filter_map(|node| {
            let input = graph.value(node.inputs().next()?)?;
            (input.shape.len() == 3).then(|| input.shape.clone())
        });
        Ok(shapes.collect())
    };
    launch(LaunchConfig::new(2), body).unwrap().swap_remove(0)
}

#[test]
fn norms_of_cut_tokens_run_on_the_tokens_of_each_rank() {
    let _guard = seeded();
    println!("{:?}", squared(tensor_parallel()));
    println!("{:?}", squared(sequence_parallel()));
    println!("{:?}", counts(&[("model", 3)], sequence_parallel()));
}
