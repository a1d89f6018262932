//! Bytes of gradients and of replaced values, if the optimizer steps in backward.

use burn::optim::SgdConfig;
use burn::tensor::{Device, Tensor};
use burn_fsdp_shard::{
    Error, Memory, ShardPolicy, backward, backward_and_step, fully_shard, memory, recompute,
    reset_peak,
};

use super::{Block, HEAP, NUM_BLOCKS, Net, ROOT, UNIT, alone, blocks, checkpointing, on_ranks};

type Loss = fn(&Net, &Device) -> Tensor<1>;

/// Small activations: gradients are most of the memory of backward.
fn ordinary(net: &Net, device: &Device) -> Tensor<1> {
    net.loss([1, 5], device)
}

/// Each block in its own region.
fn recomputed(net: &Net, device: &Device) -> Tensor<1> {
    let tokens = Tensor::<1, burn::tensor::Int>::arange(0..5, device).reshape([1, 5]);
    let mut x = net.embed.forward(tokens);
    for block in &net.blocks {
        x = recompute(block, x, |block: &Block, x| {
            let y = block.up.forward(block.norm.forward(x.clone()));
            x + block.down.forward(burn::tensor::activation::gelu(y))
        });
    }
    net.head.forward(x).powf_scalar(2.0).mean()
}

fn step(net: Net, loss: Loss, device: &Device, in_backward: bool) -> Result<Net, Error> {
    let mut optim = SgdConfig::new().init();
    let loss = loss(&net, device);
    if in_backward {
        return backward_and_step(loss, net, &mut optim, 1e-3);
    }
    let gradients = backward(loss, &net)?;
    Ok(optim.step(1e-3, net, gradients))
}

/// Returns the memory over step number `number` on two ranks, and the maximum growth of the heap in it.
fn of_step(number: usize, policy: ShardPolicy, loss: Loss, in_backward: bool) -> (Memory, usize) {
    let seen = on_ranks(2, move |world, mesh| {
        let device = checkpointing();
        let mut model = fully_shard(Net::new(&device), &mesh, policy.clone())?;
        let mut grown = 0;
        for _ in 0..number {
            reset_peak(&model)?;
            world.barrier("before the step")?;
            let before = HEAP.current_usage();
            HEAP.reset_peak_usage();
            world.barrier("measured")?;
            model = step(model, loss, &device, in_backward)?;
            world.barrier("after the step")?;
            grown = HEAP.peak_usage().saturating_sub(before);
            world.barrier("measured")?;
        }
        Ok((memory(&model)?, grown))
    });
    seen[0].clone()
}

/// Norms and biases, which every rank holds whole: one gamma and two biases a block, and no other.
const WHOLE: usize = NUM_BLOCKS * 4 * (super::DIM + 4 * super::DIM + super::DIM);

#[test]
fn shard_gradients_of_one_unit_exist_at_a_time() {
    let _turn = alone();
    for loss in [ordinary, recomputed] {
        for (number, prefetch) in [(1, 0), (1, 1), (3, 0), (3, 1)] {
            let policy = || blocks().prefetch(prefetch);
            // Two ranks have half of a unit's gradients each.
            let (memory, _) = of_step(number, policy(), loss, true);
            assert_eq!(memory.gradients_peak, UNIT / 2);
            let (memory, _) = of_step(number, policy(), loss, false);
            let all = NUM_BLOCKS * UNIT / 2 + ROOT / 2 + WHOLE;
            assert_eq!(memory.gradients_peak, all);
        }
    }
}

/// Neither gradients nor replaced values stay until backward ends: not in the graph, in its checkpoints, in copies of
/// regions, or in the engine.
#[test]
fn the_heap_grows_by_less_than_the_gradients() {
    let _turn = alone();
    // The first step fills pools that later ones reuse.
    for loss in [ordinary, recomputed] {
        let (_, grown) = of_step(3, blocks().prefetch(0), loss, true);
        let (_, usual) = of_step(3, blocks().prefetch(0), loss, false);
        println!("{grown} bytes in backward, {usual} after it");
        // Both ranks together.
        let gradients = NUM_BLOCKS * UNIT + ROOT;
        assert!(grown < gradients / 2, "{grown} of {gradients}");
        assert!(usual > gradients, "the bound can fail: {usual}");
    }
}
