//! Checksums of values that ranks should hold alike.

use burn_fsdp_collectives::{CommCounter, OperationKind, ProcessMesh};
use burn_fsdp_mesh::Mesh;
use burn_fsdp_shard::{
    Agreement, BufferSync, ShardPolicy, Strategy, check_agreement, fully_shard, sync_buffers,
};

use super::bench::{build, device, on_ranks, ready};
use super::nets::{CONV_NET, MLP, Mlp};

#[test]
fn sharded_modules_agree_from_the_start() {
    for ranks in 1..=4 {
        for strategy in [Strategy::FullShard, Strategy::NoShard] {
            on_ranks(ranks, move |world| {
                let policy = ShardPolicy::new().units(["blocks.*"]).strategy(strategy);
                let model = build(MLP, &world, &device(), policy)?;
                let counter = CommCounter::new([&world]);
                check_agreement(&model, Agreement::Parameters)?;
                counter.expect(&[(OperationKind::Exchange, 1)]);
                Ok(())
            });
        }
    }
}

#[test]
fn an_unmanaged_parameter_is_named_with_the_ranks() {
    let messages = on_ranks(3, |world| {
        let device = device();
        let mesh = ProcessMesh::new(&world, Mesh::line("shard", 3)?)?;
        let mut model = ready(|| Mlp::new(&device));
        // Ranks 0 and 1 hold the same value, rank 2 another one.
        let value = if world.rank() == 2 { 0.5 } else { 0.25 };
        struct Fill(f32);
        impl burn::module::ModuleMapper for Fill {
            fn map_float<const D: usize>(
                &mut self,
                param: burn::module::Param<burn::tensor::Tensor<D>>,
            ) -> burn::module::Param<burn::tensor::Tensor<D>> {
                param.map(|old| old.full_like(self.0))
            }
        }
        model = burn::module::Module::map(model, &mut Fill(value));
        let first = model.blocks.remove(0);
        model
            .blocks
            .insert(0, fully_shard(first, &mesh, ShardPolicy::new())?);
        let error = check_agreement(&model, Agreement::Parameters).expect_err("they differ");
        Ok(error.to_string())
    });
    for message in &messages {
        assert_eq!(message, &messages[0]);
        assert!(message.contains("ranks 0 and 2"), "{message}");
        assert!(message.contains("`embed.weight`"), "{message}");
        assert!(message.contains("one seed"), "{message}");
    }
}

#[test]
fn running_states_are_compared_if_asked() {
    on_ranks(2, |world| {
        let device = device();
        let policy = ShardPolicy::new().units(["convs.*"]);
        let model = build(CONV_NET, &world, &device, policy)?;
        drop((CONV_NET.loss)(&model, world.rank(), 0, &device));
        check_agreement(&model, Agreement::Parameters)?;
        let differ = check_agreement(&model, Agreement::ParametersAndBuffers);
        let message = differ.expect_err("trained on other batches").to_string();
        assert!(message.contains("`norms.0.running_mean`"), "{message}");
        let model = sync_buffers(model, BufferSync::Broadcast)?;
        check_agreement(&model, Agreement::ParametersAndBuffers)
    });
}
