//! The same job by other tools that people use today, on the same machine in the same run.

use std::{
    fs,
    time::{Duration, Instant},
};

use serde::Serialize;
use serde_json::{Value, json};

use super::{number, tools};
use crate::stats::median;
use mercury_lab::{
    error::{Context, Error, Result, wait_for},
    kernel::Kernel,
    machine::Machine,
    paths,
    spec::{Bus, Qemu, Reset, Spec},
};

const MEMORY_MIB: u32 = 1024;
const LIMIT: Duration = Duration::from_secs(900);

/// A way to write a system or application into an image.
#[derive(Clone, Debug, Serialize)]
pub struct Way {
    pub name: &'static str,
    /// The time for which applications stand still, in seconds; `None` if they do not go on.
    pub pause_seconds: Option<f64>,
    /// Seconds until the image is complete.
    pub total_seconds: f64,
    pub image_bytes: f64,
    /// The pause, divided by Mercury's.
    pub pause_over_mercury: Option<f64>,
    /// The total time, divided by Mercury's.
    pub total_over_mercury: f64,
    /// The image's size, divided by Mercury's.
    pub image_over_mercury: f64,
}

/// The results of all ways, with their machine.
#[derive(Clone, Debug, Serialize)]
pub struct Peers {
    /// The results, Mercury's first.
    pub ways: Vec<Way>,
    /// The number of rounds; figures are medians.
    pub rounds: usize,
    pub machine: String,
}

/// The result of one round.
#[derive(Clone, Copy, Debug)]
struct Once {
    pause: Option<f64>,
    total: f64,
    bytes: f64,
}

type Means = fn(&Machine) -> Result<Once>;

/// Ways that run on one machine, in turn.
const WAYS: [(&str, Means); 4] = [
    ("Mercury", mercury),
    ("QEMU savevm", savevm),
    ("QEMU migrate to a file", migrate),
    ("CRIU, PostgreSQL alone", criu),
];
/// Ways that need a machine of their own, which is of no use afterwards.
const LAST_WAYS: [(&str, Means); 2] =
    [("the kernel's hibernation", hibernation), ("kdump, makedumpfile -d 31", kdump)];

/// Measures each way so many times.
///
/// # Errors
/// If a machine or a way fails.
pub fn measure(rounds: usize) -> Result<Peers> {
    let machine = at_rest(spec()?)?;
    machine.sh(&format!(
        "{}modprobe -a unix_diag tcp_diag udp_diag inet_diag 2> /dev/null; true",
        tools::SHELL
    ))?;
    machine.mercury("load")?;
    let mut found: Vec<(&'static str, Vec<Once>)> =
        WAYS.iter().map(|(name, _)| (*name, Vec::new())).collect();
    for _ in 0..rounds {
        for ((name, means), (_, times)) in WAYS.iter().zip(&mut found) {
            times.push(once(name, *means, &machine)?);
            // The database that ran before must go on.
            machine.sh("psql -At bench -c 'select count(*) from pgbench_branches'")?;
        }
    }
    machine.check_health()?;
    machine.shut_down()?;
    for (name, means) in LAST_WAYS {
        let alone =
            |_| once(name, means, &at_rest(spec()?.kernel_arg("crashkernel=256M").reset(Reset::Restarts))?);
        found.push((name, (0..rounds).map(alone).collect::<Result<Vec<_>>>()?));
    }
    Ok(Peers { ways: compare(&found), rounds, machine: spec()?.summary() })
}

/// Boots a machine whose database has worked, and is at rest.
fn at_rest(spec: Spec) -> Result<Machine> {
    let machine = Machine::boot(spec)?;
    // CRIU requires that the processes share memory with no others.
    machine.sh("unshare --ipc lab-postgres start")?;
    machine.command("pgbench -n -c 2 -T 10 bench").run()?.check()?;
    Ok(machine)
}

fn once(name: &str, means: Means, machine: &Machine) -> Result<Once> {
    let once = means(machine)?;
    println!("    {name}: {once:?}");
    Ok(once)
}

fn compare(found: &[(&'static str, Vec<Once>)]) -> Vec<Way> {
    let of = |times: &[Once], what: fn(&Once) -> Option<f64>| {
        let known: Vec<f64> = times.iter().filter_map(what).collect();
        (!known.is_empty()).then(|| median(&known))
    };
    let medians = |times: &[Once]| {
        let total = of(times, |once| Some(once.total)).unwrap_or(f64::NAN);
        Once {
            pause: of(times, |once| once.pause),
            total,
            bytes: of(times, |once| Some(once.bytes)).unwrap_or(f64::NAN),
        }
    };
    let mercury = found.first().map(|(_, times)| medians(times));
    let way = |(name, times): &(&'static str, Vec<Once>)| {
        let (once, mercury) = (medians(times), mercury?);
        Some(Way {
            name,
            pause_seconds: once.pause,
            total_seconds: once.total,
            image_bytes: once.bytes,
            pause_over_mercury: once.pause.zip(mercury.pause).map(|(pause, mercury)| pause / mercury),
            total_over_mercury: once.total / mercury.total,
            image_over_mercury: once.bytes / mercury.bytes,
        })
    };
    found.iter().filter_map(way).collect()
}

/// Describes a machine with virtio only, since QEMU cannot save an NVMe disk.
fn spec() -> Result<Spec> {
    let spec = Spec::new(Kernel::BookwormCloud).cpus(2).memory_mib(MEMORY_MIB).root_bus(Bus::Virtio);
    let spec = spec.disk(Bus::Virtio, 2048).disk(Bus::Virtio, 2048).qemu_version(Qemu::Newer);
    Ok(tools::arguments()?.iter().fold(spec, |spec, argument| spec.qemu_arg(argument)))
}

/// Runs a command while an application watches the clock. Returns how long the application stood
/// still, how long the command took, and the command's output.
fn watched(machine: &Machine, line: &str) -> Result<(f64, f64, String)> {
    machine.sh("rm -f /run/gap.end")?;
    let mut watcher = machine.spawn("mercury-workload gap --until-file /run/gap.end")?;
    std::thread::sleep(Duration::from_secs(1));
    let line = format!("{}\nset -e\n{line}", tools::SHELL);
    let begun = Instant::now();
    let said = machine.command(&line).timeout(LIMIT).run()?.check()?.stdout;
    let total = begun.elapsed().as_secs_f64();
    machine.sh("touch /run/gap.end")?;
    let _ = watcher.has_ended()?;
    let gap = watcher.wait(LIMIT)?.check()?.stdout;
    let gap: Value = serde_json::from_str(&gap).map_err(|_| Error::Host(gap))?;
    Ok((number(&gap, "longest_us")? / 1e6, total, said))
}

fn mercury(machine: &Machine) -> Result<Once> {
    let (gap, total, said) = watched(machine, "mercury --json checkpoint --overwrite $(disk disk0)")?;
    let report = serde_json::from_str(&said).map_err(|_| Error::Host(said))?;
    Ok(Once { pause: Some(gap), total, bytes: number(&report, "image")? })
}

/// The command that hibernates, and prints on the console the bytes written and the watcher's
/// observation.
const HIBERNATE: &str = r#"
mercury-workload gap --until-file /run/gap.end > /run/gap.said 2> /dev/null &
swap=$(disk disk1); mkswap $swap > /dev/null; swapon $swap
written() { awk '{print $7}' /sys/block/${swap##*/}/stat; }
images() { dmesg | grep -c 'hibernation: Wrote'; }
sleep 1
echo test_resume > /sys/power/disk
before=$(written); had=$(images)
echo disk > /sys/power/state
bytes=$(( ($(written) - before) * 512 ))
test $(images) -gt $had || bytes=none
touch /run/gap.end; wait
echo "<3>hibernated: {\"image\": $bytes, \"watched\": $(cat /run/gap.said)}" > /dev/kmsg
"#;

/// Measures a hibernation until its image is written, by the kernel's own test that ends there.
/// Linux 6.1 cannot open a swap space again that is in use, and does not release it. No task runs
/// from the instant until the image is written, nor until the image has been read again.
fn hibernation(machine: &Machine) -> Result<Once> {
    let before = machine.serial_log().len();
    machine.put("/run/hibernate", format!("{}{HIBERNATE}", tools::SHELL).as_bytes(), 0o755)?;
    machine.sh("rm -f /run/gap.end; setsid sh /run/hibernate > /run/hibernate.said 2>&1 < /dev/null &")?;
    // The agent must not be spoken to meanwhile: half a message would be lost.
    let said = wait_for("the image of a hibernation", LIMIT, || {
        let log = machine.serial_log();
        let line = log.get(before..).and_then(|new| new.split_once("hibernated: "));
        Ok(line.and_then(|(_, rest)| rest.split_once('\n')).map(|(line, _)| line.trim().to_owned()))
    })?;
    let report: Value = serde_json::from_str(&said)
        .map_err(|_| machine.blame(Error::Host(format!("hibernation: {said}"))))?;
    machine.power_cut()?;
    let gap = number(&report["watched"], "longest_us")? / 1e6;
    Ok(Once { pause: Some(gap), total: gap, bytes: number(&report, "image")? })
}

/// Measures QEMU's `savevm`, during which the machine stands still.
fn savevm(machine: &Machine) -> Result<Once> {
    let qmp = machine.qmp()?;
    let begun = Instant::now();
    qmp.savevm("peer")?;
    let total = begun.elapsed().as_secs_f64();
    let list = qmp.human("info snapshots")?;
    qmp.human("delvm peer")?;
    let bytes = saved_bytes(&list).ok_or_else(|| Error::Host(format!("QEMU lists {list}")))?;
    Ok(Once { pause: Some(total), total, bytes })
}

/// Reads the bytes from a line like `--    peer    312 MiB 2026-01-01 …`.
fn saved_bytes(list: &str) -> Option<f64> {
    let line = list.lines().find(|line| line.split_whitespace().nth(1) == Some("peer"))?;
    let mut words = line.split_whitespace().skip(2);
    let size: f64 = words.next()?.parse().ok()?;
    let unit = match words.next()? {
        "KiB" => 1 << 10,
        "MiB" => 1 << 20,
        "GiB" => 1 << 30,
        _ => return None,
    };
    Some(size * f64::from(unit))
}

/// Measures QEMU's migration to a file. Memory goes first while the machine runs; the machine
/// stands still for the rest.
fn migrate(machine: &Machine) -> Result<Once> {
    let qmp = machine.qmp()?;
    let file = paths::lab_dir("bench")?.join("migrated");
    let begun = Instant::now();
    qmp.execute("migrate-set-parameters", json!({ "max-bandwidth": 8_u64 << 30 }))?;
    qmp.execute("migrate", json!({ "uri": format!("file:{}", file.display()) }))?;
    let done = loop {
        let state = qmp.execute("query-migrate", json!({}))?;
        match state["status"].as_str() {
            Some("completed") => break state,
            Some("failed" | "cancelled") => return Err(Error::Host(format!("QEMU's migration: {state}"))),
            _ if begun.elapsed() > LIMIT => return Err(Error::Host(format!("QEMU's migration: {state}"))),
            _ => std::thread::sleep(Duration::from_millis(20)),
        }
    };
    let total = begun.elapsed().as_secs_f64();
    qmp.cont()?;
    let bytes = fs::metadata(&file).context(|| "look at the file of the migration".into())?.len() as f64;
    let _ = fs::remove_file(&file);
    Ok(Once { pause: Some(number(&done, "downtime")? / 1e3), total, bytes })
}

/// Measures CRIU on the database's processes only, which go on afterwards. CRIU itself reports how
/// long they stood still.
fn criu(machine: &Machine) -> Result<Once> {
    let line = r"
        rm -rf /root/criu; mkdir /root/criu
        tool sbin/criu dump --tree $(head -1 /var/lib/postgresql/*/main/postmaster.pid) \
            --images-dir /root/criu --leave-running --tcp-established --ext-unix-sk --file-locks \
            --manage-cgroups=ignore --shell-job --log-file dump.log > /dev/null 2>&1 \
            || { tail -20 /root/criu/dump.log >&2; exit 1; }
        sync -f /root/criu
        cat /root/criu/*.img | wc -c";
    let (_, total, said) = watched(machine, line)?;
    let bytes: f64 = said.trim().parse().map_err(|_| Error::Host(format!("CRIU: {said}")))?;
    let stats = machine.get("/root/criu/stats-dump")?;
    let pause = stood_still_us(&stats)
        .ok_or_else(|| Error::Host("CRIU's statistics have an unknown format".into()))?;
    Ok(Once { pause: Some(pause as f64 / 1e6), total, bytes })
}

/// Reads CRIU's `stats-dump`: two magic numbers, a length, and a message of protocol buffers. Field
/// 1 is a message with two numbers: 1, the time until all tasks are frozen; 2, the time for which
/// they were.
fn stood_still_us(stats: &[u8]) -> Option<u64> {
    let mut bytes = stats.get(12..)?;
    (number_of(&mut bytes)? == 1 << 3 | 2).then_some(())?;
    let length = number_of(&mut bytes)? as usize;
    let mut fields = bytes.get(..length)?;
    let (mut freezing, mut frozen) = (None, None);
    while !fields.is_empty() {
        let (key, value) = (number_of(&mut fields)?, number_of(&mut fields)?);
        match key {
            8 => freezing = Some(value),
            16 => frozen = Some(value),
            _ => {}
        }
    }
    Some(freezing? + frozen?)
}

/// Reads a number with seven bits a byte.
fn number_of(bytes: &mut &[u8]) -> Option<u64> {
    let mut number = 0;
    for shift in (0..64).step_by(7) {
        let (first, rest) = bytes.split_first()?;
        *bytes = rest;
        number |= u64::from(first & 0x7F) << shift;
        if first & 0x80 == 0 {
            return Some(number);
        }
    }
    None
}

/// Measures kdump, of which the machine dies: from the panic until the other kernel has written the
/// dump, as Debian's kdump-tools does.
fn kdump(machine: &Machine) -> Result<Once> {
    machine.sh(
        "kexec -p /boot/vmlinuz-$(uname -r) --initrd=/mercury/initramfs/$(uname -r).cpio --reuse-cmdline \
         --append=nr_cpus=1",
    )?;
    let boots = machine.boots();
    let begun = Instant::now();
    let _dead = machine.spawn("echo c > /proc/sysrq-trigger")?;
    machine.wait_reboot(boots)?;
    let line = format!(
        "{}test -s /proc/vmcore && tool bin/makedumpfile -c -d 31 /proc/vmcore /root/vmcore > /dev/null && \
         sync && stat -c %s /root/vmcore",
        tools::SHELL
    );
    let said = machine.command(&line).timeout(LIMIT).run()?.check()?.stdout;
    let total = begun.elapsed().as_secs_f64();
    machine.forgive();
    let bytes = said.trim().parse().map_err(|_| Error::Host(format!("makedumpfile: {said}")))?;
    Ok(Once { pause: None, total, bytes })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn outputs_of_other_tools_are_parsed() {
        let list = "List of snapshots present on all disks:\nID TAG VM_SIZE DATE\n--   peer   312.5 MiB \
            2026-01-01 00:00:00\n";
        assert_eq!(saved_bytes(list), Some(312.5 * 1024.0 * 1024.0));
        assert_eq!(saved_bytes("There is no snapshot available."), None);
        let entry = [0x08, 0x90, 0x4E, 0x10, 0xE0, 0xD4, 0x03, 0x18, 0x05];
        let mut stats = vec![0; 12];
        stats.extend([0x0A, entry.len() as u8]);
        stats.extend(entry);
        assert_eq!(stood_still_us(&stats), Some(10_000 + 60_000));
        assert_eq!(stood_still_us(&stats[..16]), None);
    }

    #[test]
    fn others_are_compared_with_the_first() {
        let once = |pause, total, bytes| Once { pause, total, bytes };
        let ways = compare(&[
            ("Mercury", vec![once(Some(0.2), 10.0, 100.0); 3]),
            ("another", vec![once(Some(4.0), 5.0, 200.0)]),
            ("a dump", vec![once(None, 30.0, 50.0)]),
        ]);
        assert_eq!(ways.len(), 3);
        assert_eq!((ways[1].pause_over_mercury, ways[1].total_over_mercury), (Some(20.0), 0.5));
        assert_eq!((ways[2].pause_over_mercury, ways[2].image_over_mercury), (None, 0.5));
    }
}
