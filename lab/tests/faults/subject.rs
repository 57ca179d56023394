//! A machine at work under failures, and the conditions that must hold after each failure.

use std::{fmt::Debug, time::Duration};

use mercury_abi::{code::Code, gate::FaultPoint};
use mercury_lab::{Error, Machine, Result, Spec, Variant, command::Background, operator::complaints};
use serde_json::Value;

/// The machine, its work, and the first state of its CPUs.
pub struct Subject {
    pub machine: Machine,
    cpus: u32,
    work: Background,
    state: String,
}

/// The exit and the output of a command.
pub struct Reply {
    pub exit: i32,
    pub text: String,
}

impl Reply {
    pub fn json(&self) -> Result<Value> {
        serde_json::from_str(&self.text)
            .map_err(|error| Error::Unhealthy(format!("no JSON ({error}): {}", self.text)))
    }
}

/// Work that computes on every CPU, and writes to the disk, reads back and compares. It rests much
/// of the time, so that a test takes no longer than necessary.
const WORK: &str = r"
    exec {nap}<> <(:)
    nice -n 19 mercury-workload --until-file /tmp/stop compute --rest 5 > /tmp/computed & compute=$!
    echo 4 > /proc/sys/vm/drop_caches
    dd if=/dev/urandom of=/root/original bs=64k count=8 status=none
    until [ -e /tmp/stop ]; do
        cp /root/original /root/copy && sync /root/copy && echo 1 > /proc/sys/vm/drop_caches
        cmp /root/original /root/copy || exit 1
        read -t 0.6 -u $nap
    done
    wait $compute || exit 1
    cat /tmp/computed";

/// A command that reads the whole state of each CPU by the test module, without a process of its
/// own for each.
const STATE: &str = r#"
    exec 3<> /dev/mercury_test
    for cpu in /sys/devices/system/cpu/cpu[0-9]*; do
        echo "state ${cpu##*cpu}" >&3
        while read -r line <&3; do echo "CPU ${cpu##*cpu}: $line"; done
    done"#;

/// The separator between the replies of commands that run in one go.
const SEPARATOR: char = '\x1e';

impl Subject {
    /// Boots a machine with the driver that has fault points, and puts it to work.
    pub fn boot(spec: Spec, cpus: u32) -> Result<Self> {
        let machine = Machine::boot(spec.cpus(cpus).modules(Variant::Faults))?;
        println!("{}: {}", machine.kernel(), machine.arguments().join(" "));
        machine.sh("insmod /mercury/lib/modules/$(uname -r)/mercury_test.ko")?;
        machine.mercury("load")?;
        let work = machine.spawn(WORK)?;
        let state = machine.sh(STATE)?;
        same("the state is read", state.lines().count() > 50 * cpus as usize, true)?;
        Ok(Self { machine, cpus, work, state })
    }

    /// Returns the first CPU, one in the middle, and the last.
    pub fn cpus(&self) -> Vec<u32> {
        vec![0, self.cpus / 2, self.cpus - 1]
    }

    /// Runs commands one after the other, successful or not.
    pub fn run(&self, lines: &[&str]) -> Result<Vec<Reply>> {
        let script: String =
            lines.iter().map(|line| format!("( {line}\n); printf '{SEPARATOR}%d{SEPARATOR}' $?\n")).collect();
        let output = self.machine.run(&script)?.stdout;
        let mut parts = output.split(SEPARATOR);
        let mut replies = Vec::new();
        while let (Some(text), Some(exit)) = (parts.next(), parts.next()) {
            replies.push(Reply { exit: exit.parse().unwrap_or(-1), text: text.to_owned() });
        }
        same("replies", replies.len(), lines.len())?;
        Ok(replies)
    }

    /// Runs commands that must succeed. Returns the last one's reply.
    pub fn must(&self, lines: &[&str]) -> Result<Reply> {
        let mut replies = self.run(lines)?;
        for (line, reply) in lines.iter().zip(&replies) {
            same(&format!("`{line}` ({})", reply.text), reply.exit, 0)?;
        }
        replies.pop().ok_or(Error::Unhealthy("nothing was run".into()))
    }

    /// Checks that an attach after `prepare` is refused with this code on this CPU.
    pub fn attach_is_refused(&self, prepare: &[&str], code: Code, cpu: u32) -> Result<()> {
        let attach = "mercury --json attach";
        let replies = self.run(&[prepare, &[attach]].concat())?;
        for (line, reply) in prepare.iter().zip(&replies) {
            same(line, reply.exit, 0)?;
        }
        let reply = &replies[prepare.len()];
        let error = &reply.json()?["error"];
        let exit = if (40..100).contains(&(code as u32)) { 3 } else { 1 };
        let found = (reply.exit, error["code"].as_str(), error["cpu"].as_u64());
        same(attach, found, (exit, Some(code.name()), Some(u64::from(cpu))))
    }

    /// Checks the conditions after each failure: every CPU is native and in its first state, the
    /// work goes on, and the kernel has no complaint.
    pub fn is_as_before(&mut self) -> Result<Value> {
        let status = "mercury --json status";
        let replies =
            self.run(&[status, STATE, "dmesg", "read taint < /proc/sys/kernel/tainted; echo $taint"])?;
        let status = replies[0].json()?;
        same("modes", modes(&status), vec!["native"; self.cpus as usize])?;
        same("the state of the CPUs", differences(&self.state, &replies[1].text), Vec::new())?;
        same("complaints of the kernel", complaints(&replies[2].text), Vec::new())?;
        // The taint of an unsigned out-of-tree module, and nothing else.
        same("taint", replies[3].text.trim(), "12288")?;
        if self.work.has_ended()? {
            return Err(Error::Unhealthy(format!("the work has ended: {}", self.work.output_so_far()?)));
        }
        Ok(status)
    }

    /// Checks that the next attach switches every CPU, and the next detach every CPU back.
    /// `prepare` runs before.
    pub fn attaches_again(&self, prepare: &[&str]) -> Result<()> {
        let lines = [prepare, &["mercury --json attach", "mercury --json detach"]].concat();
        let replies = self.run(&lines)?;
        for (line, reply) in lines.iter().zip(&replies) {
            same(&format!("`{line}` ({})", reply.text), reply.exit, 0)?;
        }
        for reply in &replies[prepare.len()..] {
            same("switched", reply.json()?["count"].as_u64(), Some(u64::from(self.cpus)))?;
        }
        Ok(())
    }

    /// Checks that a crashed hypervisor is not used again until it has been loaded afresh.
    pub fn recovers_from_crash(&self) -> Result<()> {
        let refused = r#"mercury --json attach | grep '"code": "crashed"'; exit $((5 - PIPESTATUS[0]))"#;
        self.attaches_again(&[refused, FRESH])
    }

    /// Returns the events of one kind in the log.
    pub fn events(&self, kind: &str) -> Result<Vec<Value>> {
        let log = self.machine.mercury("log")?;
        let events = log["events"].as_array().cloned().unwrap_or_default();
        Ok(events.into_iter().filter(|event| event["kind"] == kind).collect())
    }

    /// Ends the work, which must have been right throughout.
    pub fn finish(mut self) -> Result<()> {
        self.is_as_before()?;
        self.machine.sh("touch /tmp/stop")?;
        let computed = self.work.wait(Duration::from_secs(60))?.check()?.stdout;
        let computed: Value = serde_json::from_str(&computed).unwrap_or_default();
        same(
            "computed",
            (computed["passes"].as_u64() > Some(0), computed["violations"].as_u64()),
            (true, Some(0)),
        )
    }
}

/// The command that frees the hypervisor. The next attach loads it.
pub const FRESH: &str = "mercury unload --keep-driver";

/// Returns the command that arms a point.
pub fn arm(point: FaultPoint, cpu: Option<u32>, passage: u32) -> String {
    let cpu = cpu.map(|cpu| format!("--cpu {cpu}")).unwrap_or_default();
    format!("mercury fault {} {cpu} --passage {passage}", point as u32)
}

/// Returns the mode that each CPU reports.
pub fn modes(status: &Value) -> Vec<&str> {
    let cpus = status["cpus"].as_array().map(Vec::as_slice).unwrap_or_default();
    cpus.iter().filter_map(|cpu| cpu["mode"].as_str()).collect()
}

/// Reads a hexadecimal number from a string.
pub fn hex(value: &Value) -> Option<u64> {
    u64::from_str_radix(value.as_str()?.trim_start_matches("0x"), 16).ok()
}

fn differences(before: &str, now: &str) -> Vec<String> {
    let pairs = before.trim().lines().zip(now.trim().lines());
    let changed =
        pairs.filter(|(before, now)| before != now).map(|(before, now)| format!("{before} -> {now}"));
    let count = (before.trim().lines().count(), now.trim().lines().count());
    changed.chain((count.0 != count.1).then(|| format!("{count:?} lines"))).collect()
}

/// Returns an error that names a wrong value.
pub fn same<T: PartialEq + Debug>(what: &str, found: T, wanted: T) -> Result<()> {
    if found == wanted {
        return Ok(());
    }
    Err(Error::Unhealthy(format!("{what}: found {found:?}, wanted {wanted:?}")))
}
