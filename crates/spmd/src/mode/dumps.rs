//! Dumps of a mode's plans.

use std::path::PathBuf;

use super::Mode;
use crate::dump::{GraphDump, Watch};
use crate::error::Error;
use crate::graph::Graph;

impl Mode {
    /// Writes the graphs of each plan into a separate folder in `folder`: `graph-0` and so on, in the order in which
    /// plans are created. There are plans for the first step, the steps after it, other shapes, micro-batches, and
    /// evaluations. Each folder holds the graph as it was traced and the graph after each pass: as text (as it
    /// [prints](crate::graph)), as a picture (SVG) and for Graphviz (DOT). `changes.txt` lists the changes of each
    /// pass. See [`GraphDump`].
    ///
    /// Rank 0 of the mode's group writes. Plans and their fingerprints do not change, but creating a plan takes longer.
    /// The first complete plan replaces the graphs of an earlier run. Steps that are compiled with clones of this mode
    /// continue the numbering. For a rejected plan, the folder holds all graphs that were created until then, and the
    /// error.
    ///
    /// If graphs cannot be written, the step is rejected on all ranks before it changes anything, on rank 0 with
    /// [`Error::Dump`].
    ///
    /// ```no_run
    /// use burn_fsdp_spmd::Mode;
    ///
    /// let mode = Mode::single().dump("graphs");
    /// ```
    #[must_use]
    pub fn dump(mut self, folder: impl Into<PathBuf>) -> Self {
        self.dump = Some(GraphDump::new(folder));
        self
    }

    /// Creates a plan, and writes its graphs if requested.
    ///
    /// # Errors
    ///
    /// The errors of `make`, whether or not its graphs were written; [`Error::Dump`].
    pub(crate) fn dumped<T>(
        &self,
        title: &str,
        make: impl FnOnce(&mut Watch<'_>) -> Result<T, Error>,
    ) -> Result<T, Error> {
        let is_first = self.ranks.group().rank() == 0;
        let Some(dump) = self.dump.as_ref().filter(|_| is_first) else {
            return make(&mut |_, _| {});
        };
        let mut record = dump.begin(title)?;
        let made = make(&mut |part: &'static str, graph: &Graph| record.see(part, graph));
        let written = record.end(made.as_ref().err());
        let made = made?;
        written?;
        Ok(made)
    }
}
