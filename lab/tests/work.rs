//! Real work across a checkpoint and a restore: it goes on without a gap, and its results are
//! right.

#![allow(clippy::unwrap_used)]

mod workloads;

use std::time::Duration;

use mercury_lab::{
    Bus, Kernel, Machine, Reservation, Result,
    ledger::{self, Ledger},
    restart::{
        self, boot_id, check_chain, comes_further, count, is_well, nothing_wrong, results,
        script::{BUILDS, CHAIN, CLIENT, CLOCK, EXPORTS, HEAR, READS, RING, TELL},
        start,
    },
};
use workloads::restart::{
    DISK, balances_agree, checkpoint, checkpoint_to, free_port, need_qemu, plug_in, prepare, snapshot_of,
    spec, wired,
};

const CLIENTS: [&str; 4] = ["client0", "client1", "client2", "client3"];

/// Shows clients on a third machine no more than a pause. Their connections go on, and all
/// committed transactions are there once. One client sends all the time, whether or not a server
/// listens.
#[test]
#[ignore = "long"]
fn clients_outside_go_on() -> Result<()> {
    need_qemu()?;
    let both = Reservation::of(2, &[Kernel::BookwormCloud])?;
    let port = free_port();
    let peer = wired(spec(Kernel::BookwormCloud).cpus(1).memory_mib(768), port, "listen");
    let peer = Machine::boot_reserved(peer, &both)?;
    let machine = Machine::boot_reserved(wired(spec(Kernel::BookwormCloud), port, "connect"), &both)?;
    plug_in(&peer, "10.9.0.1")?;
    plug_in(&machine, "10.9.0.2")?;
    ledger::serve(&machine)?;
    start(&machine, "clock", CLOCK, "")?;
    for (number, name) in CLIENTS.iter().enumerate() {
        start(&peer, name, CLIENT, &number.to_string())?;
    }
    start(&machine, "hear", HEAR, "")?;
    start(&peer, "tell", TELL, "10.9.0.2")?;
    let (boot, _folder) = prepare(&machine, "--module $MERCURY_MODULE")?;
    let boot_id = boot_id(&machine)?;
    checkpoint(&machine)?;
    let counts = || CLIENTS.iter().map(|name| count(&peer, name)).collect::<Result<Vec<_>>>();
    let before = counts()?;
    let machine = machine.start_other(&boot)?;
    is_well(&machine, &boot_id)?;
    CLIENTS.iter().zip(&before).try_for_each(|(name, before)| comes_further(&peer, name, *before))?;
    comes_further(&machine, "hear", count(&peer, "tell")?)?;
    let acknowledged = results(&peer, &CLIENTS)?;
    println!("acknowledged before {before:?}, in all {acknowledged:?}");
    let told: Vec<u64> = acknowledged.iter().map(|count| count.parse().unwrap()).collect();
    let ledger = Ledger::of(&machine, &told)?;
    assert!(ledger.is_right(), "{ledger:?}");
    nothing_wrong(&machine)?;
    machine.check_next_attach()?;
    machine.ends_clean()
}

/// A script that starts PostgreSQL with all its data on a file system of its own, on `data`, a
/// device-mapper device on a disk. Everything else is read-only.
const DATABASE_ON_DATA: &str = r#"
set -e
modprobe dm-snapshot
sectors=$(blockdev --getsz /dev/vdb)
dmsetup create data --noudevsync --table "0 $sectors snapshot-origin /dev/vdb"
mke2fs -q -t ext4 /dev/dm-0
mkdir /run/data /run/postgresql
mount /dev/dm-0 /run/data
cp -a /var/lib/postgresql/*/main /run/data/main
chown postgres: /run/postgresql
set -- /usr/lib/postgresql/*/bin/postgres -D /run/data/main -c data_directory=/run/data/main \
    -c config_file=$(ls /etc/postgresql/*/main/postgresql.conf)
setsid setpriv --reuid postgres --regid postgres --init-groups "$@" > /run/postgres.said 2>&1 < /dev/null &
for i in $(seq 60); do psql -c 'create table note (said text)' bench && exit; sleep 1; done
cat /run/postgres.said
exit 1
"#;

/// A script that puts the origin back to its old contents, in a system that has not read it.
const PUT_DATA_BACK: &str = r#"
set -e
modprobe dm-snapshot
sectors=$(blockdev --getsz /dev/vdb)
dmsetup create back --noudevsync --table "0 $sectors snapshot-merge /dev/vdb /dev/vdc P 16"
dmsetup status back
for i in $(seq 600); do
    set -- $(dmsetup status back)
    # Sectors in use, all sectors, and those that only record where data is.
    if [ "${4%/*}" = "$5" ]; then
        dmsetup remove --noudevsync back
        exit
    fi
    sleep 0.1
done
exit 1
"#;

/// Checkpoints a running machine, whose database is on a disk with a device-mapper snapshot of the
/// same moment. With the disk put back the machine is restored to that moment. Without that it is
/// refused.
#[test]
#[ignore = "long"]
fn a_database_goes_back_with_its_disk() -> Result<()> {
    need_qemu()?;
    let disks = spec(Kernel::BookwormCloud).disk(Bus::Virtio, 512).disk(Bus::Virtio, 512);
    let machine = Machine::boot(disks.kernel_arg("ro").memory_mib(1280))?;
    machine.sh(DATABASE_ON_DATA)?;
    start(&machine, "clock", CLOCK, "")?;
    machine.put("/run/freeze", snapshot_of("data", "/dev/vdb", "/dev/vdc").as_bytes(), 0o755)?;
    machine.sh("setsid pgbench -n -c 4 -T 3600 bench > /run/pgbench.said 2>&1 < /dev/null & sleep 2")?;
    let ask = |machine: &Machine, query: &str| machine.sh(&format!("psql -qAt bench -c \"{query}\""));
    let history = |machine: &Machine| -> Result<u64> {
        Ok(ask(machine, "select count(*) from pgbench_history")?.parse().unwrap())
    };
    let (boot, _folder) = prepare(&machine, "--module $MERCURY_MODULE")?;
    let boot_id = boot_id(&machine)?;
    ask(&machine, "insert into note values ('before')")?;
    let earlier = history(&machine)?;
    machine.sh(&format!(
        "modprobe -r kvm_amd 2> /dev/null; mercury checkpoint --hook 'sh /run/freeze' {DISK}"
    ))?;
    ask(&machine, "insert into note values ('after')")?;
    let later = history(&machine)?;
    comes_further(&machine, "clock", count(&machine, "clock")? + 40)?;
    let moved_on = machine.sh("dmsetup status frozen; sync")?;
    let last = history(&machine)?;
    println!("transactions: {earlier} before, {later} after, {last} at the end; {moved_on}");
    assert!(later < last, "it ran on");

    let machine = machine.start_again()?;
    let refused = machine.run(&format!("mercury restore --module $MERCURY_MODULE {DISK}"))?;
    assert!(!refused.success() && refused.stderr.contains("was written to after the instant"), "{refused:?}");
    println!("{}", machine.sh(PUT_DATA_BACK)?);
    let machine = machine.start_other(&boot)?;
    is_well(&machine, &boot_id)?;
    assert_eq!(ask(&machine, "select said from note")?, "before");
    let restored = history(&machine)?;
    assert!((earlier..=later).contains(&restored), "{restored} transactions");
    machine.sh("dmsetup remove --noudevsync frozen")?;
    comes_further(&machine, "clock", count(&machine, "clock")? + 40)?;
    assert!(history(&machine)? > restored, "{}", machine.sh("cat /run/pgbench.said")?);
    machine.sh("pkill pgbench; while pgrep pgbench; do sleep 0.1; done")?;
    assert!(!machine.sh("cat /run/pgbench.said")?.contains("ERROR"));
    balances_agree(&machine)?;
    machine.sh(
        "kill -INT $(head -1 /run/data/main/postmaster.pid); while pgrep postgres; do sleep 0.1; done; \
         umount /run/data",
    )?;
    println!("{}", machine.sh("e2fsck -fn /dev/dm-0")?);
    machine.check_next_attach()?;
    machine.ends_clean()
}

/// Runs work across a restore. Each result would differ if a byte did.
fn work_goes_on(kernel: Kernel, cpus: u32) -> Result<()> {
    need_qemu()?;
    let machine = Machine::boot(spec(kernel).cpus(cpus))?;
    start(&machine, "clock", CLOCK, "")?;
    let work = [("chain", CHAIN), ("ring", RING), ("builds", BUILDS)];
    work.iter().try_for_each(|(name, script)| start(&machine, name, script, ""))?;
    let compute = "mercury-workload --until-file /run/end compute --rest 1 > /run/compute 2>&1";
    machine.sh(&format!("setsid sh -c '{compute}; mv /run/compute /run/compute.ended' < /dev/null &"))?;
    let (boot, _folder) = prepare(&machine, "--module $MERCURY_MODULE")?;
    let boot_id = boot_id(&machine)?;
    let names = work.map(|(name, _)| name);
    let counts =
        |machine: &Machine| names.iter().map(|name| count(machine, name)).collect::<Result<Vec<_>>>();
    let before = counts(&machine)?;
    checkpoint(&machine)?;
    let machine = machine.start_other(&boot)?;
    is_well(&machine, &boot_id)?;
    let brought_back = counts(&machine)?;
    println!("done before {before:?}, when brought back {brought_back:?}");
    for (name, count) in names.iter().zip(&brought_back) {
        comes_further(&machine, name, *count)?;
    }
    let ended = results(&machine, &["chain", "ring", "builds", "compute"])?;
    println!("{ended:?}");
    check_chain(&ended[0])?;
    let computed: serde_json::Value = serde_json::from_str(ended[3].lines().last().unwrap()).unwrap();
    assert_eq!(computed["violations"], 0, "{computed}");
    assert!(computed["passes"].as_u64() > Some(0), "{computed}");
    machine.check_next_attach()?;
    machine.ends_clean()
}

#[test]
#[ignore = "long"]
fn work_goes_on_on_one_cpu() -> Result<()> {
    work_goes_on(Kernel::BookwormCloud, 1)
}

#[test]
#[ignore = "long"]
fn work_goes_on_on_debian_13() -> Result<()> {
    work_goes_on(Kernel::TrixieCloud, 2)
}

#[test]
#[ignore = "long"]
fn work_goes_on_on_four_cpus() -> Result<()> {
    work_goes_on(Kernel::BookwormCloud, 4)
}

/// Boots an NFS server, and a machine with this name and script at work, whose files are all on the
/// server. The kernel's command line has `version` after the machine's address.
fn boot_on_nfs(version: &str, (work, script): (&str, &str)) -> Result<(Machine, Machine)> {
    let both = Reservation::of(2, &[Kernel::BookwormCloud])?;
    let port = free_port();
    let server = wired(spec(Kernel::BookwormCloud).cpus(1).memory_mib(768), port, "listen");
    let server = Machine::boot_reserved(server, &both)?;
    plug_in(&server, "10.9.0.1")?;
    start(&server, "exports", EXPORTS, "")?;
    let spec = spec(Kernel::BookwormCloud).kernel_arg(&format!("lab.nfs=10.9.0.1,10.9.0.2{version}"));
    let machine = Machine::boot_reserved(wired(spec, port, "connect"), &both)?;
    assert_eq!(machine.sh("findmnt -no FSTYPE /; findmnt -rno TARGET -t ext4")?, "nfs4\n/mercury");
    start(&machine, "clock", CLOCK, "")?;
    start(&machine, work, script, "")?;
    Ok((server, machine))
}

/// Checks that a machine was restored, that its work with the server's files goes on, and that it is
/// native.
fn is_well_on_nfs(machine: Machine, server: Machine, boot_id: &str, work: &str) -> Result<()> {
    is_well(&machine, boot_id)?;
    comes_further(&machine, work, count(&machine, work)? + 1)?;
    println!("{work}: {:?}", results(&machine, &[work])?);
    assert_eq!(server.sh("cat /root/after")?, "written");
    machine.check_next_attach()?;
    machine.ends_clean()?;
    server.ends_clean()
}

/// Restores a machine whose files are all on an NFS server, which serves them on while the machine
/// is off.
#[test]
#[ignore = "long"]
fn a_machine_on_nfs_goes_on() -> Result<()> {
    need_qemu()?;
    let (server, machine) = boot_on_nfs("", ("builds", BUILDS))?;
    let (boot, _folder) = restart::prepare(&machine, "/root/image", "--module $MERCURY_MODULE")?;
    let boot_id = boot_id(&machine)?;
    checkpoint_to(&machine, "/root/image")?;
    is_well_on_nfs(machine.start_other(&boot)?, server, &boot_id, "builds")
}

/// A process that writes and reads a file on an NFS server all the time.
const WRITES: &str = r#"
import os
file, count = os.open("/mnt/root/written", os.O_RDWR | os.O_CREAT), 0
while True:
    os.pwrite(file, b"%08d" % count, 0)
    os.fsync(file)
    count += 1
    say(count)
"#;

/// Names a file system whose NFS server is gone, within a limit, when a task waits for the server. The root
/// is on a disk.
#[test]
#[ignore = "long"]
fn a_server_of_files_that_is_gone_is_named() -> Result<()> {
    const LIMIT: Duration = Duration::from_secs(60);
    need_qemu()?;
    let both = Reservation::of(2, &[Kernel::BookwormCloud])?;
    let port = free_port();
    let server = wired(spec(Kernel::BookwormCloud).cpus(1).memory_mib(768), port, "listen");
    let server = Machine::boot_reserved(server, &both)?;
    let machine = Machine::boot_reserved(wired(spec(Kernel::BookwormCloud), port, "connect"), &both)?;
    plug_in(&server, "10.9.0.1")?;
    plug_in(&machine, "10.9.0.2")?;
    start(&server, "exports", EXPORTS, "")?;
    machine.sh("mount -i -t nfs4 10.9.0.1:/ /mnt -o vers=4.0,addr=10.9.0.1,clientaddr=10.9.0.2")?;
    start(&machine, "writes", WRITES, "")?;
    comes_further(&machine, "writes", 10)?;
    machine.sh("modprobe -r kvm_amd 2> /dev/null || true")?;
    server.qmp()?.human("stop")?;
    machine.sh("sleep 3")?;
    let silent = "the servers of these file systems do not answer: /mnt (10.9.0.1:/)";
    for (line, reason) in [
        ("mercury checkpoint /run/image", silent),
        (&*format!("mercury checkpoint --poweroff --overwrite {DISK}"), silent),
        ("mercury checkpoint /mnt/root/image", "/mnt/root/image cannot be reached: it has not answered for"),
    ] {
        let refused = machine.command(line).timeout(LIMIT).run()?;
        println!("{line}: {}", refused.stderr);
        assert!(!refused.success() && refused.stderr.contains(reason), "{line}: {refused:?}");
        assert_ne!(machine.mercury("status")?["state"], "attached", "{line}");
    }
    let written = count(&machine, "writes")?;
    server.qmp()?.human("cont")?;
    comes_further(&machine, "writes", written)?;
    machine.sh("pkill -f '^python3 /run/writes.py'; mercury checkpoint /run/image && rm /run/image")?;
    machine.check_next_attach()
}

/// Checkpoints a running machine whose files are all on an NFS server. The machine runs on, reads
/// files, and loses its power. Restored, it meets a server that has answered its first life. With a
/// later version of NFS it would stand still, so that is refused.
#[test]
#[ignore = "long"]
fn a_machine_on_nfs_runs_on_and_goes_back() -> Result<()> {
    need_qemu()?;
    let (server, machine) = boot_on_nfs(",4.0", ("reads", READS))?;
    let (boot, _folder) = prepare(&machine, "--module $MERCURY_MODULE")?;
    let boot_id = boot_id(&machine)?;
    let checkpoint = format!("modprobe -r kvm_amd 2> /dev/null; mercury checkpoint {DISK}");
    machine.sh("mount -i -t nfs4 10.9.0.1:/ /mnt -o vers=4.2,addr=10.9.0.1,clientaddr=10.9.0.2")?;
    let refused = machine.run(&checkpoint)?;
    assert!(!refused.success() && refused.stderr.contains("/mnt is on NFS 4.2"), "{refused:?}");
    machine.sh("umount /mnt")?;
    machine.sh(&checkpoint)?;
    comes_further(&machine, "clock", count(&machine, "clock")? + 40)?;
    comes_further(&machine, "reads", count(&machine, "reads")? + 2)?;
    is_well_on_nfs(machine.start_other(&boot)?, server, &boot_id, "reads")
}
