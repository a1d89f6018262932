//! The verbs together: `fully_shard`, `replicate`, ignored modules, and their order.

use burn::module::Module;
use burn_fsdp_collectives::{OperationKind, ProcessMesh};
use burn_fsdp_mesh::Mesh;
use burn_fsdp_shard::{
    Error, ShardPolicy, UnitState, backward, catch, fully_shard, replicate, units, unused_units,
};

use super::bench::{
    Outcome, SEED, assert_close, device, on_ranks, optimizer, params, plainly, seed_turn,
    whole_params,
};
use super::nets::{MLP, Mlp};

fn with_mesh<T: Send + 'static>(
    ranks: usize,
    body: impl Fn(ProcessMesh, Mlp) -> Result<T, Error> + Send + Sync + 'static,
) -> Vec<T> {
    on_ranks(ranks, move |world| {
        let mesh = ProcessMesh::new(&world, Mesh::line("shard", world.size())?)?;
        let device = device();
        let model = (MLP.build)(&device);
        {
            // Each rank the same numbers, one rank and one test at a time.
            let _turn = seed_turn();
            device.seed(SEED);
            params(&model);
        }
        body(mesh, model)
    })
}

fn trains(
    ranks: usize,
    wrap: impl Fn(&ProcessMesh, Mlp) -> Result<Mlp, Error> + Send + Sync + 'static,
) -> Outcome {
    let outcomes = with_mesh(ranks, move |mesh, model| {
        let device = device();
        let mut model = wrap(&mesh, model)?;
        let mut optim = optimizer();
        for step in 0..10 {
            let loss = (MLP.loss)(&model, mesh.world().rank(), step, &device);
            let gradients = backward(loss, &model)?;
            model = optim.step(1e-2, model, gradients);
        }
        Ok(whole_params((MLP.build)(&device), &model))
    });
    Outcome {
        losses: plainly(MLP, ranks, 10).losses,
        params: outcomes[0].clone(),
    }
}

#[test]
fn replicate_alone_and_below_a_parent_agrees() {
    for ranks in 1..=4 {
        let want = plainly(MLP, ranks, 10);
        let all = trains(ranks, |mesh, model| {
            replicate(model, mesh, ShardPolicy::new().units(["blocks.*"]))
        });
        assert_close(&all, &want, 1e-5);
        let mixed = trains(ranks, |mesh, mut model| {
            let head = replicate(model.head, mesh, ShardPolicy::new())?;
            model.head = head;
            fully_shard(model, mesh, ShardPolicy::new().units(["blocks.*"]))
        });
        assert_close(&mixed, &want, 1e-5);
        // A shard below a replica below a shard: the replica's subtree is left alone.
        let nested = trains(ranks, |mesh, mut model| {
            let mut block = model.blocks.remove(1);
            block.up = fully_shard(block.up, mesh, ShardPolicy::new())?;
            let block = replicate(block, mesh, ShardPolicy::new())?;
            model.blocks.insert(1, block);
            fully_shard(model, mesh, ShardPolicy::new().units(["blocks.*"]))
        });
        assert_close(&nested, &want, 1e-5);
    }
}

#[test]
fn units_come_in_the_order_of_the_module_in_every_form() {
    let names = with_mesh(2, |mesh, model| {
        let by_policy = fully_shard(
            model.clone(),
            &mesh,
            ShardPolicy::new().units(["blocks.*", "head"]),
        )?;
        let mut model = model;
        model.head = fully_shard(model.head, &mesh, ShardPolicy::new())?;
        model.blocks = model
            .blocks
            .into_iter()
            .rev()
            .map(|block| fully_shard(block, &mesh, ShardPolicy::new()))
            .collect::<Result<Vec<_>, _>>()?;
        model.blocks.reverse();
        let by_hand = fully_shard(model, &mesh, ShardPolicy::new())?;
        let names = |model: &Mlp| -> Result<Vec<_>, Error> {
            Ok(units(model)?.iter().map(|unit| unit.name()).collect())
        };
        Ok((names(&by_policy)?, names(&by_hand)?))
    });
    for (by_policy, by_hand) in names {
        assert_eq!(
            by_policy,
            ["root", "blocks.0", "blocks.1", "blocks.2", "head"]
        );
        assert_eq!(by_policy, by_hand);
    }
}

#[test]
fn names_are_kept() {
    with_mesh(2, |mesh, model| {
        let before: Vec<_> = params(&model).into_iter().map(|(path, _)| path).collect();
        let model = fully_shard(model, &mesh, ShardPolicy::new().units(["blocks.*"]))?;
        let of_units = units(&model)?;
        let mut after: Vec<_> = of_units
            .iter()
            .flat_map(|unit| unit.parameters())
            .map(str::to_owned)
            .collect();
        let mut sorted = before;
        sorted.sort();
        after.sort();
        assert_eq!(after, sorted);
        Ok(())
    });
}

#[test]
fn ignored_modules_are_left_alone() {
    let seen = with_mesh(2, |mesh, model| {
        let policy = ShardPolicy::new().units(["blocks.*"]).ignore(["head"]);
        let model = fully_shard(model, &mesh, policy)?;
        let world = mesh.world();
        for step in 0..2 {
            let before = world.counts();
            let loss = (MLP.loss)(&model, world.rank(), step, &device());
            let gradients = backward(loss, &model)?;
            // The head's own, and those of all others.
            assert_eq!(gradients.len(), 1 + 1 + 1 + 3 * 7 + 1);
            let since = world.counts().since(&before);
            assert_eq!(since.of(OperationKind::ReduceScatter).operations, 4);
        }
        Ok(model.head.weight.val().into_data().convert::<f32>())
    });
    assert_eq!(seen.len(), 2);
    let message = with_mesh(1, |mesh, model| {
        let nothing = fully_shard(model.clone(), &mesh, ShardPolicy::new().ignore(["tail"]));
        let mut twice = model;
        twice.head = fully_shard(twice.head, &mesh, ShardPolicy::new())?;
        let sharded = fully_shard(twice, &mesh, ShardPolicy::new().ignore(["head"]));
        Ok((
            nothing.err().map(|e| e.to_string()),
            sharded.err().map(|e| e.to_string()),
        ))
    });
    let (nothing, sharded) = message[0].clone();
    let (nothing, sharded) = (nothing.unwrap_or_default(), sharded.unwrap_or_default());
    assert!(nothing.contains("`tail` matches no module"), "{nothing}");
    assert!(
        sharded.contains("`head.weight` is to be ignored, but is sharded"),
        "{sharded}"
    );
}

#[test]
fn verbs_refuse_a_second_time() {
    let messages = with_mesh(1, |mesh, model| {
        let again = |model: Mlp| {
            fully_shard(model, &mesh, ShardPolicy::new())
                .err()
                .map(|e| e.to_string())
        };
        let sharded = fully_shard(model.clone(), &mesh, ShardPolicy::new())?;
        let replicated = replicate(model, &mesh, ShardPolicy::new())?;
        let replica = replicate(sharded.clone(), &mesh, ShardPolicy::new())
            .err()
            .map(|e| e.to_string());
        Ok([again(sharded), again(replicated), replica])
    });
    for message in messages[0].clone() {
        let message = message.unwrap_or_default();
        assert!(
            message.contains("belongs to a unit already, such as `root`"),
            "{message}"
        );
    }
}

#[test]
fn units_tell_their_state_and_unshard_by_hand() {
    with_mesh(2, |mesh, model| {
        let model = fully_shard(model, &mesh, ShardPolicy::new().units(["blocks.*"]))?;
        let all = units(&model)?;
        let block = &all[1];
        assert_eq!(
            (block.name().as_str(), block.state()),
            ("blocks.0", UnitState::Sharded)
        );
        let handle = block.unshard()?;
        assert_eq!(block.state(), UnitState::Gathering);
        handle.wait()?;
        assert_eq!(block.state(), UnitState::Unsharded);
        block.reshard()?;
        assert_eq!(block.state(), UnitState::Sharded);
        let _left_to_the_forward = block.unshard()?;
        let loss = (MLP.loss)(&model, mesh.world().rank(), 0, &device());
        assert_eq!(all[0].state(), UnitState::Unsharded, "the root stays");
        assert_eq!(
            block.state(),
            UnitState::Sharded,
            "dropped after its forward"
        );
        backward(loss, &model)?;
        assert!(all.iter().all(|unit| unit.state() == UnitState::Sharded));
        Ok(())
    });
}

/// Training goes on after an error in forward and in backward.
#[test]
fn an_error_leaves_everything_sharded() {
    let want = plainly(MLP, 2, 3);
    let seen = with_mesh(2, |mesh, model| {
        let device = device();
        let rank = mesh.world().rank();
        let mut model = fully_shard(model, &mesh, ShardPolicy::new().units(["blocks.*"]))?;
        let mut optim = optimizer();
        for step in 0..3 {
            // The same on all ranks: a forward that gives up half way, and a backward without end.
            let half = catch(|| {
                model.blocks[0].up.weight.val();
                model.blocks[1].up.weight.val();
            });
            half?;
            burn_fsdp_shard::reset(&model)?;
            assert!(
                units(&model)?
                    .iter()
                    .all(|unit| unit.state() == UnitState::Sharded)
            );
            let loss = (MLP.loss)(&model, rank, step, &device);
            let gradients = backward(loss, &model)?;
            model = optim.step(1e-2, model, gradients);
        }
        assert_eq!(unused_units(&model)?, Vec::<String>::new());
        Ok(whole_params((MLP.build)(&device), &model))
    });
    let got = Outcome {
        losses: want.losses.clone(),
        params: seen[0].clone(),
    };
    assert_close(&got, &want, 1e-5);
}

#[test]
fn units_that_took_no_part_are_named() {
    with_mesh(2, |mesh, model| {
        let model = fully_shard(model, &mesh, ShardPolicy::new().units(["blocks.*", "head"]))?;
        let loss = model.head.weight.val().sum();
        backward(loss, &model)?;
        assert_eq!(
            unused_units(&model)?,
            ["root", "blocks.0", "blocks.1", "blocks.2"]
        );
        Ok(())
    });
}

/// Several forwards before one backward, and one backward for each of several forwards.
#[test]
fn forwards_and_backwards_may_alternate_freely() {
    let norms = with_mesh(2, |mesh, model| {
        let device = device();
        let rank = mesh.world().rank();
        let model = fully_shard(model, &mesh, ShardPolicy::new().units(["blocks.*"]))?;
        let loss = |step| (MLP.loss)(&model, rank, step, &device);
        let sum = |gradients: &burn::optim::GradientsParams| -> f32 {
            gradients
                .get::<1>(model.norm.gamma.id)
                .map_or(0.0, |g| g.sum().into_scalar::<f32>())
        };
        let head = |gradients: burn::optim::GradientsParams| -> f32 {
            let mut total = Total(&gradients, sum(&gradients));
            model.visit(&mut total);
            total.1
        };
        let together = head(backward(loss(0) + loss(1), &model)?);
        let (first, second) = (loss(0), loss(1));
        let apart = head(backward(first, &model)?) + head(backward(second, &model)?);
        Ok((together, apart))
    });
    for (together, apart) in norms {
        assert!(
            (together - apart).abs() <= 1e-5 * together.abs().max(1.0),
            "{together} {apart}"
        );
    }
}

struct Total<'a>(&'a burn::optim::GradientsParams, f32);

impl burn::module::ModuleVisitor for Total<'_> {
    fn visit_float<const D: usize>(
        &mut self,
        param: &burn::module::Param<burn::tensor::Tensor<D>>,
    ) {
        if let Some(gradient) = self.0.get::<D>(param.id) {
            self.1 += gradient.sum().into_scalar::<f32>();
        }
    }
}
