//! The report as human-readable text.

use std::fmt;

use crate::train::report::Report;

/// Bytes of a 32-bit parameter.
const PARAMETER_BYTES: usize = 4;
const MIB: f64 = (1 << 20) as f64;

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "trained {}{} parameters on {} rank{} ({}{}), {}",
            if self.trained_params == self.params {
                String::new()
            } else {
                format!("{} adapter parameters on top of ", self.trained_params)
            },
            self.params,
            self.ranks,
            if self.ranks == 1 { "" } else { "s" },
            self.strategy,
            if self.compiled { ", compiled" } else { "" },
            self.data
        )?;
        if self.first_step > 0 {
            write!(f, "resumed    from step {}", self.first_step)?;
            if self.losses.is_empty() {
                writeln!(
                    f,
                    ", with no steps left to train; raise --steps to continue"
                )?
            } else {
                writeln!(f)?
            }
        }
        if let (Some(first), Some(last)) = (self.losses.first(), self.losses.last()) {
            write!(f, "loss       {first:.4} -> {last:.4}")?;
            if let Some(eval_loss) = self.eval_loss {
                write!(f, ", held-out text {eval_loss:.4}")?;
            }
            writeln!(f)?;
        }
        if let (Some(tokens), Some(step)) = (self.tokens_per_s, self.step_ms) {
            write!(
                f,
                "speed      {tokens:.0} tokens/s, {:.1} ms per step",
                step.median
            )?;
            if let Some(flops) = self.flops_per_s {
                write!(f, ", {:.1} GFLOP/s", flops / 1e9)?;
            }
            if let Some(part) = self.utilization {
                let percent = 100.0 * part;
                write!(f, ", {percent:.1} % of the rate of matrix products")?;
            }
            writeln!(f)?;
        }
        self.fmt_memory(f)?;
        if !self.recomputed_units.is_empty() {
            let units = self.recomputed_units.join(", ");
            writeln!(f, "recomputed {units}, to stay within the memory budget")?;
        }
        if let Some(products) = &self.products {
            writeln!(f, "products   {products}")?;
        }
        if !self.losses.is_empty() {
            writeln!(f, "curve      {}", self.curve)?;
        }
        match (self.saved_step, self.interrupted) {
            (Some(step), true) => writeln!(
                f,
                "stopped    by a signal, after saving step {step}; --resume continues from it"
            )?,
            (Some(step), false) => writeln!(f, "saved      step {step}")?,
            (None, _) => {}
        }
        for warning in &self.warnings {
            writeln!(f, "warning    {warning}")?;
        }
        match &self.sample {
            Some(sample) => write!(f, "sample\n{sample}"),
            None => Ok(()),
        }
    }
}

impl Report {
    fn fmt_memory(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mib = |bytes: &usize| format!("{:.1}", *bytes as f64 / MIB);
        let list = |bytes: &[usize]| bytes.iter().map(mib).collect::<Vec<_>>().join(", ");
        writeln!(
            f,
            "per rank   {} MiB of parameters and optimizer, at most {} MiB unsharded",
            list(&self.state_bytes),
            list(&self.unsharded_peak_bytes)
        )?;
        let mut whole = PARAMETER_BYTES * (self.params + self.optimizer_values);
        if self.trained_params != self.params {
            // Adapters add parameters to the model's own.
            whole += PARAMETER_BYTES * self.trained_params;
        }
        let held = self.state_bytes.iter().max().copied().unwrap_or(whole);
        if held < whole {
            writeln!(
                f,
                "sharding   saves {} of {} MiB of parameters and optimizer on each rank",
                mib(&(whole - held)),
                mib(&whole),
            )?;
        }
        let staged = |direction: usize| -> Vec<usize> {
            let of = |staged: &[usize; 2]| staged[direction];
            self.staged_bytes.iter().map(of).collect()
        };
        if self.staged_bytes.iter().flatten().any(|bytes| *bytes > 0) {
            writeln!(
                f,
                "copies     {} MiB per step from the device, {} MiB to the device",
                list(&staged(0)),
                list(&staged(1))
            )?;
        }
        for bytes in &self.peak_rss_bytes {
            writeln!(f, "process    {:.1} MiB at most", *bytes as f64 / MIB)?;
        }
        Ok(())
    }
}
