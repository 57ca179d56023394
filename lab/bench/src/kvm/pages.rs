//! The cost of a live snapshot for guests: the first touch of each page, which fills the shadow of
//! KVM's nested table, and the touches after it.

use std::time::Duration;

use serde::Serialize;

use super::{LIMIT, MEMORY_MIB};
use crate::{counts::counting_machine, stats::rounded};
use mercury_lab::{
    command::Background,
    error::{Error, Result},
    machine::Machine,
    spec::Qemu,
};

const SCRIPT: &[u8] = include_bytes!("../../../guest/kvm/pages");
/// The pool for copies, in MiB: more than the guest and the system write.
const POOL_MIB: u32 = 256;
/// Time limit of a line of the script.
const TOUCH_LIMIT: Duration = Duration::from_secs(120);

/// One way to touch pages.
#[derive(Clone, Debug, Serialize)]
pub struct Touch {
    pub what: &'static str,
    /// Instructions for each page.
    #[serde(serialize_with = "rounded")]
    pub instructions: f64,
}

/// Measures all ways, in this order on one machine. The guest itself needs four instructions for a
/// page.
///
/// # Errors
/// If the machine fails.
pub fn measure() -> Result<Vec<Touch>> {
    let machine = Machine::boot(counting_machine(MEMORY_MIB).qemu_version(Qemu::Newer))?;
    machine.put("/root/pages", SCRIPT, 0o755)?;
    machine.sh("modprobe kvm_amd")?;
    machine.mercury("load")?;
    let mut guest = machine.spawn("/root/pages")?;
    guest.wait_output("ready", LIMIT)?;
    let mut all = Vec::new();
    let mut touch = |what: &'static str, words: &str| -> Result<()> {
        let instructions = touched(&mut guest, words)?;
        println!("    {what}: {instructions:.1} instructions a page");
        all.push(Touch { what, instructions });
        Ok(())
    };
    for half in ["lower", "upper"] {
        touch("natively, the first in its life", &format!("write {half}"))?;
    }
    touch("natively", "write lower")?;
    machine.mercury("attach")?;
    touch("attached", "write lower")?;
    machine.mercury(&format!("snapshot --force-disks --pool {POOL_MIB}"))?;
    touch("snapshot live, first touch: read", "read lower")?;
    touch("snapshot live, read again", "read lower")?;
    touch("snapshot live, first write after reads", "write lower")?;
    touch("snapshot live, first touch: write", "write upper")?;
    touch("snapshot live, written again", "write upper")?;
    let kept = machine.mercury("status")?["snapshot"]["state"] == "kept";
    machine.mercury("snapshot --drop")?;
    touch("attached, after the snapshot", "write upper")?;
    machine.mercury("detach")?;
    touch("natively, after the detach", "write upper")?;
    guest.close_stdin()?;
    guest.wait(LIMIT)?.check()?;
    machine.check_health()?;
    machine.shut_down()?;
    if kept { Ok(all) } else { Err(Error::Unhealthy("the snapshot was lost meanwhile".into())) }
}

/// Sends a waiting process a line on which it touches pages and reports. A nanosecond is an
/// instruction.
pub(crate) fn touched(guest: &mut Background, words: &str) -> Result<f64> {
    let number = guest.output_so_far()?.matches("touched").count() + 1;
    guest.write_stdin(format!("{words}\n").as_bytes())?;
    guest.wait_output_times("touched ", number, TOUCH_LIMIT)?;
    let said = guest.output_so_far()?;
    let last = said.trim_end().rsplit("touched ").next().and_then(|last| last.parse().ok());
    last.ok_or_else(|| Error::Host(format!("no number: {said}")))
}
