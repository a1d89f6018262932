//! Switches of units: the effect of each on operations and bytes.

use burn_fsdp_collectives::OperationKind;
use burn_fsdp_shard::{
    ShardPolicy, backward, dummy_forward, memory, no_sync, params_with_gradient, reset_peak, units,
};

use super::bench::{
    Case, assert_close, build, device, on_ranks, optimizer, plainly_stepped, stepped,
};
use super::nets::{MLP, Mlp};

/// Bytes of the full parameters of the three blocks and of the root.
const BLOCKS: usize = 4 * 3 * (3 * 15 * 7);
const ROOT: usize = 4 * (11 * 15 + 15 * 7);

fn blocks() -> ShardPolicy {
    ShardPolicy::new().units(["blocks.*"])
}

#[test]
fn units_kept_after_forward_are_gathered_once() {
    for (reshards, gathers, kept) in [(true, 7, ROOT), (false, 4, ROOT + BLOCKS)] {
        on_ranks(2, move |world| {
            let device = device();
            let mut model = build(MLP, &world, &device, blocks())?;
            for unit in units(&model)?.into_iter().skip(1) {
                unit.set_reshard_after_forward(reshards)?;
            }
            let mut optim = optimizer();
            for step in 0..3 {
                let before = world.counts();
                let loss = model.loss(world.rank(), step, &device);
                if !reshards {
                    assert_eq!(memory(&model)?.unsharded_live, kept, "after forward");
                }
                let gradients = backward(loss, &model)?;
                let since = world.counts().since(&before);
                let seen = since.of(OperationKind::AllGather).operations;
                assert_eq!(seen, gathers, "step {step}, reshards: {reshards}");
                assert_eq!(memory(&model)?.unsharded_live, 0);
                model = optim.step(1e-2, model, gradients);
            }
            Ok(())
        });
    }
}

#[test]
fn units_kept_after_backward_serve_the_next_forward() {
    on_ranks(2, |world| {
        let device = device();
        let model = build(MLP, &world, &device, blocks())?;
        let switch = |reshards| -> Result<(), burn_fsdp_shard::Error> {
            let all = units(&model)?;
            all.iter()
                .try_for_each(|unit| unit.set_reshard_after_backward(reshards))
        };
        backward(model.loss(world.rank(), 0, &device), &model)?;
        assert_eq!(memory(&model)?.unsharded_live, 0);
        switch(false)?;
        backward(model.loss(world.rank(), 0, &device), &model)?;
        assert_eq!(memory(&model)?.unsharded_live, ROOT + BLOCKS);
        switch(true)?;
        backward(model.loss(world.rank(), 0, &device), &model)?;
        assert_eq!(memory(&model)?.unsharded_live, 0);
        Ok(())
    });
}

/// The loss that [`dummy_forward`] documents.
const MEANS: Case<Mlp> = Case {
    build: Mlp::new,
    loss: |model, _, _, _| {
        let mut sum = model.embed.weight.val().mean();
        for block in &model.blocks {
            for vector in [
                Some(&block.norm.gamma),
                block.norm.beta.as_ref(),
                block.up.bias.as_ref(),
                block.down.bias.as_ref(),
            ] {
                sum = sum + vector.expect("every layer has it").val().mean();
            }
            for matrix in [&block.up.weight, &block.gate.weight, &block.down.weight] {
                sum = sum + matrix.val().mean();
            }
        }
        let bias = model.head.bias.as_ref().expect("the head has one").val();
        sum + model.norm.gamma.val().mean() + model.head.weight.val().mean() + bias.mean()
    },
};

#[test]
fn a_dummy_forward_touches_every_parameter_and_nothing_else() {
    for ranks in 1..=3 {
        let got = stepped(MLP, ranks, blocks(), |model, world, _| {
            reset_peak(model)?;
            let before = world.counts();
            let loss = dummy_forward(model)?;
            let since = world.counts().since(&before);
            assert_eq!(since.of(OperationKind::AllGather).operations, 4);
            let gradients = backward(loss, model)?;
            let every = 2 + 3 * 7 + 2;
            let got = params_with_gradient(model, &gradients).len();
            assert_eq!(got, every, "a gradient for each parameter");
            assert!(memory(model)?.unsharded_peak >= ROOT || world.size() == 1);
            Ok(gradients)
        });
        assert_close(&got, &plainly_stepped(MEANS, ranks), 1e-5);
    }
}

#[test]
fn printed_memory_has_every_number_and_the_pinned_weights() {
    on_ranks(2, |world| {
        let device = burn::tensor::Device::flex().autodiff();
        let model = build(MLP, &world, &device, blocks())?;
        for step in 0..2 {
            backward(model.loss_of_row(world.rank(), step, &device), &model)?;
        }
        let of_root = || backward(model.loss_of_row(world.rank(), 2, &device), &model);
        no_sync(&model.embed, of_root)??;
        let memory = memory(&model)?;
        assert_eq!(memory.unreduced, ROOT);
        let numbers = [
            ("parameters held", memory.parameters),
            ("unsharded, now", memory.unsharded_live),
            ("unsharded, peak", memory.unsharded_peak),
            ("unreduced gradients", memory.unreduced),
            ("kept for later use", memory.pooled),
        ];
        let text = memory.to_string();
        for (name, bytes) in numbers {
            assert!(bytes > 0, "{name} in {memory:?}");
            let line = format!("{name:<19}{bytes:>12} B");
            assert!(text.lines().any(|own| own == line), "{line} in {text}");
        }
        assert!(memory.pinned.len() >= 2, "{memory:?}");
        for pinned in &memory.pinned {
            let unit = format!("unit `{}`", pinned.unit);
            assert!(text.contains(&unit), "{unit} in {text}");
        }
        Ok(())
    });
}
