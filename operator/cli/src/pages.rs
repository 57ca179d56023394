//! The parts of help and manual pages that are not options: each command's group, examples, files,
//! other pages.

use clap::Command;

/// A group of commands in the help.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Group {
    /// Commands of the mode switch.
    Switch,
    /// Commands of images and snapshots.
    Checkpoint,
    /// Commands of the guard.
    Guard,
    /// Commands of moves between machines.
    Move,
    /// Commands of machines that go on as guests.
    Guests,
    /// Commands of hosted machines.
    Hosted,
    /// Commands for state, codes, measurements.
    Information,
}

impl Group {
    /// All groups in the order of the help.
    pub const ALL: [Self; 7] = [
        Self::Switch,
        Self::Checkpoint,
        Self::Guard,
        Self::Move,
        Self::Guests,
        Self::Hosted,
        Self::Information,
    ];

    /// Returns the heading in the help.
    #[must_use]
    pub fn heading(self) -> &'static str {
        match self {
            Self::Switch => "Mode switch",
            Self::Checkpoint => "Checkpoint, snapshot and restore",
            Self::Guard => "Hangs and panics",
            Self::Move => "Move to another machine",
            Self::Guests => "Machines that go on as guests",
            Self::Hosted => "Hosted machines",
            Self::Information => "Information",
        }
    }
}

#[derive(Clone, Copy, Debug)]
pub struct Example {
    /// Purpose of the line.
    pub purpose: &'static str,
    pub line: &'static str,
}

/// A file that a command reads or writes.
#[derive(Clone, Copy, Debug)]
pub struct File {
    pub path: &'static str,
    /// Content of the file.
    pub content: &'static str,
}

/// The additions of one command to its help and manual page.
#[derive(Clone, Copy, Debug)]
pub struct Page {
    /// The words after `mercury`; empty for `mercury` itself.
    pub command: &'static str,
    /// Group in the help; none for `mercury` itself and for commands below another one.
    pub group: Option<Group>,
    /// Lines to type.
    pub examples: &'static [Example],
    pub files: &'static [File],
    /// Pages of other programs.
    pub see_also: &'static [&'static str],
}

impl Page {
    const fn new(command: &'static str, examples: &'static [Example]) -> Self {
        Self { command, group: None, examples, files: &[], see_also: &[] }
    }

    const fn of(command: &'static str, group: Group, examples: &'static [Example]) -> Self {
        Self { group: Some(group), ..Self::new(command, examples) }
    }

    const fn files(self, files: &'static [File]) -> Self {
        Self { files, ..self }
    }

    const fn see(self, see_also: &'static [&'static str]) -> Self {
        Self { see_also, ..self }
    }
}

const fn example(purpose: &'static str, line: &'static str) -> Example {
    Example { purpose, line }
}

const fn file(path: &'static str, content: &'static str) -> File {
    File { path, content }
}

/// Returns the page of a command, by the words after `mercury`.
#[must_use]
pub fn page(command: &str) -> Option<&'static Page> {
    PAGES.iter().find(|page| page.command == command)
}

const KERNEL: File = file(
    "/boot/vmlinuz-RELEASE, /usr/lib/modules/RELEASE/vmlinuz",
    "The running kernel's image, of which the restore environment is made.",
);
const INITRD: File = file(
    "/boot/initrd.img-RELEASE",
    "The initial RAM disk, from which the restore environment gets its modules.",
);
const MENU: File = file("/boot/grub/custom.cfg", "The file that --boot-menu writes GRUB's entry to.");
const KEY_FILE: File = file(
    "/etc/mercury/destination.key",
    "The pairing token that `mercury receive` has printed on the destination. Only root may read it.",
);
const IDENTITY: File = file(
    "/etc/mercury/identity",
    "The machine's long-lived key. Only root may read it; `mercury identity` makes it.",
);
const GUESTS: File = file(
    "/run/mercury/guests/NAME, $XDG_RUNTIME_DIR/mercury/guests/NAME",
    "State and sockets of a guest, of root's guests and of other users'.",
);
const DISCO: File = file(
    "/run/mercury/disco, $XDG_RUNTIME_DIR/mercury/disco",
    "Sockets, states and consoles of templates and machines, of root's and of other users'.",
);
const CONTROL: File = file("/run/mercury/control", "The socket at which mercuryd takes orders.");
const RULES: File =
    file("/etc/mercury/guard.toml", "The rules of the guard. Without it the profile is watch.");
const DEFAULTS: File =
    file("/etc/default/mercuryd", "MERCURY_DESTINATION=HOST, and MIGRATE_OPTIONS=... for `mercury migrate`.");

/// Every page: first `mercury` itself, then its commands in the order of the help.
pub const PAGES: &[Page] = &[
    Page::new(
        "",
        &[
            example("Check if this machine can attach", "mercury doctor"),
            example("Attach, show the status, detach", "mercury attach && mercury status && mercury detach"),
            example(
                "Write an image of the machine, and power it off",
                "mercury checkpoint --poweroff /dev/sdb",
            ),
            example("Explain a refusal", "mercury explain svm-disabled"),
        ],
    )
    .files(&[
        file("/dev/mercury", "The driver's device."),
        file("/etc/mercury", "Settings: the pairing token of a destination, places of tombstones."),
        file("/usr/src/mercury-VERSION", "Sources of the driver, with the hypervisor, for DKMS."),
        file("/usr/share/doc/mercury", "README, limits, and the documents behind these pages."),
    ])
    .see(&["dkms(8)", "afterburner(1)"]),
    Page::of(
        "doctor",
        Group::Switch,
        &[
            example("Check this machine", "mercury doctor"),
            example("Show only what is not in order", "mercury doctor --quiet"),
            example("In a script", "mercury doctor --quiet || echo 'cannot attach here'"),
        ],
    ),
    Page::of(
        "load",
        Group::Switch,
        &[
            example("Load the hypervisor into memory", "mercury load"),
            example("Load it at each boot", "systemctl enable --now mercury"),
        ],
    )
    .files(&[file("/usr/lib/systemd/system/mercury.service", "The unit that loads at boot.")])
    .see(&["dkms(8)", "modprobe(8)"]),
    Page::of(
        "unload",
        Group::Switch,
        &[
            example("Free the memory and remove the driver", "mercury unload"),
            example("Detach first, if CPUs are attached", "mercury unload --detach"),
        ],
    ),
    Page::of(
        "attach",
        Group::Switch,
        &[
            example("Attach on all CPUs", "mercury attach"),
            example("Attach on some CPUs", "mercury attach --cpus 0-3,8"),
            example("Unload an unused KVM that holds the hardware", "mercury attach --unload-kvm"),
        ],
    ),
    Page::of(
        "detach",
        Group::Switch,
        &[
            example("Detach on all CPUs", "mercury detach"),
            example("Detach on one CPU", "mercury detach --cpus 8"),
        ],
    ),
    Page::of(
        "verify",
        Group::Switch,
        &[
            example("Compare the state of all CPUs", "mercury verify"),
            example("Compare the state of one CPU", "mercury verify --cpus 0"),
        ],
    ),
    Page::of(
        "checkpoint",
        Group::Checkpoint,
        &[
            example(
                "Write an image to an unused disk, and power off",
                "mercury checkpoint --poweroff /dev/sdb",
            ),
            example(
                "Write an image with a snapshot of the disks at the same instant",
                "mercury checkpoint --hook 'lvcreate -s -L 5G -n now vg/root' /net/node7",
            ),
            example(
                "Write an image every ten minutes, most of them incremental, and keep six",
                "mercury checkpoint --every 10m --incremental --keep 6 /net/node7",
            ),
            example("Send an image to another host", "mercury checkpoint ssh://root@store/images/node7"),
        ],
    ),
    Page::of(
        "restore",
        Group::Checkpoint,
        &[
            example("Bring a machine back now, in place of this system", "mercury restore /dev/sdb"),
            example(
                "Make an entry for the image in the boot menu",
                "mercury restore --prepare /boot/mercury --boot-menu /dev/sdb",
            ),
            example(
                "Let the machine go on as a guest of this system, with its network through passt",
                "mercury restore --as-guest --net passt /net/node7",
            ),
        ],
    )
    .files(&[KERNEL, INITRD, MENU, file("/dev/kvm", "KVM, for --as-guest.")])
    .see(&["kexec(8)", "mercury-guests(8)", "passt(1)"]),
    Page::of(
        "inspect",
        Group::Checkpoint,
        &[
            example("Check the whole image", "mercury inspect /dev/sdb"),
            example("Read only the head of an image", "mercury inspect --quick /net/node7"),
            example(
                "Write the memory of an image as an ELF core",
                "mercury inspect --core node7.core \
                /net/node7",
            ),
        ],
    )
    .see(&["crash(8)", "gdb(1)"]),
    Page::of(
        "merge",
        Group::Checkpoint,
        &[example(
            "Merge a full image and two incremental ones",
            "mercury merge /net/merged /net/full /net/first /net/second",
        )],
    ),
    Page::of(
        "snapshot",
        Group::Checkpoint,
        &[
            example("Keep a snapshot of this instant", "mercury snapshot"),
            example("Keep a snapshot, with 2 GiB for copies", "mercury snapshot --pool 2G"),
            example("Keep a snapshot to go back to once", "mercury snapshot --once"),
            example("Give the snapshot up", "mercury snapshot --drop"),
        ],
    ),
    Page::of("rollback", Group::Checkpoint, &[example("Go back to the snapshot", "mercury rollback")]),
    Page::of(
        "postmortem",
        Group::Checkpoint,
        &[
            example("Show what ended at the last rollback", "mercury postmortem"),
            example("Write its memory for crash or drgn", "mercury postmortem --core /var/crash/core"),
            example("Free that memory", "mercury postmortem --drop"),
        ],
    ),
    Page::of(
        "guard",
        Group::Guard,
        &[
            example("Watch this machine from now on", "mercury guard on"),
            example("Show the watch", "mercury guard status"),
            example("See what helps, the sensors, and what a rollback would lose", "mercury guard check"),
            example("Watch at each boot", "systemctl enable --now mercuryd"),
        ],
    )
    .files(&[RULES, file("/usr/share/doc/mercury/examples/guard.toml", "Rules with each key explained.")])
    .see(&["kdump-tools(5)", "sysctl(8)"]),
    Page::new(
        "guard on",
        &[
            example("Watch by the rules in /etc/mercury/guard.toml", "mercury guard on"),
            example("Watch by other rules", "mercury guard on --rules ./guard.toml"),
        ],
    )
    .files(&[RULES]),
    Page::new("guard off", &[example("Watch no longer", "mercury guard off")]),
    Page::new(
        "guard status",
        &[
            example("Show the watch", "mercury guard status"),
            example("In a script", "mercury guard status --json"),
        ],
    )
    .files(&[RULES]),
    Page::new(
        "guard scrub",
        &[
            example("Take the copy, or compare with it once", "mercury guard scrub"),
            example("Mend what nobody may have changed", "mercury guard scrub --mend"),
        ],
    )
    .files(&[file("/run/mercury/integrity", "The copy of code and constants, and what passes have found.")]),
    Page::new(
        "guard check",
        &[
            example("Check this machine", "mercury guard check"),
            example("Check with other rules", "mercury guard check --rules ./guard.toml"),
        ],
    )
    .files(&[RULES]),
    Page::new(
        "guard drill",
        &[
            example("Panic on purpose, and come back", "mercury guard drill"),
            example("Try the crash kernel: this machine restarts", "mercury guard drill --force"),
        ],
    ),
    Page::of(
        "receive",
        Group::Move,
        &[
            example("Wait for a machine; this system ends", "mercury receive"),
            example(
                "Wait at one address, for an hour",
                "mercury receive --listen 10.9.0.3:4747 --lifetime 1h",
            ),
            example(
                "Give a disk to the machine that arrives",
                "mercury receive --disk /dev/sda \
                --force-disk",
            ),
            example(
                "Make an entry in the boot menu that waits for a machine to come back",
                "mercury receive --prepare /boot/mercury-receive --boot-menu --lifetime 720h",
            ),
            example(
                "Let the machine go on as a guest of this system, on the bridge of a tap interface",
                "mercury receive --beside --net tap=tap0",
            ),
            example(
                "Take its disks as well; they become files in a folder",
                "mercury receive --beside --net tap=tap0 --disk-folder /srv/node7",
            ),
        ],
    )
    .files(&[KERNEL, INITRD, MENU, IDENTITY, GUESTS])
    .see(&["kexec(8)", "mercury-identity(8)", "mercury-guests(8)", "passt(1)"]),
    Page::of(
        "migrate",
        Group::Move,
        &[
            example("Estimate a move", "mercury migrate --dry-run"),
            example("Move, with the pairing token from standard input", "mercury migrate 10.9.0.3 --key -"),
            example(
                "Move only if applications stand still for 800 ms at most, by the estimate",
                "mercury migrate 10.9.0.3 --key - --max-downtime 800ms --or-give-up",
            ),
            example("Move a local disk too", "mercury migrate 10.9.0.3 --key - --with-disk /dev/sda"),
            example(
                "In a guest of a machine with UEFI: go back to its hardware, where `mercury receive` waits",
                "mercury migrate 10.9.0.4 --key - --without-tombstone",
            ),
        ],
    ),
    Page::of(
        "maintenance",
        Group::Move,
        &[example(
            "Move away, and back later; the pairing token is in MERCURY_KEY",
            "mercury maintenance 10.9.0.3 --max-downtime 800ms",
        )],
    ),
    Page::of(
        "evacuate",
        Group::Move,
        &[
            example("Order the move", "mercury evacuate --reason 'corrected memory errors'"),
            example("Ask for the state of the order", "mercury evacuate --status"),
        ],
    )
    .files(&[
        CONTROL,
        file(
            "/usr/share/doc/mercury/examples/memory-errors",
            "A script that gives the order for memory errors.",
        ),
    ]),
    Page::of(
        "daemon",
        Group::Move,
        &[
            example("Start the service", "systemctl enable --now mercuryd"),
            example("Run the daemon by hand", "mercury daemon --to 10.9.0.3 -- --max-downtime 800ms"),
        ],
    )
    .files(&[
        RULES,
        DEFAULTS,
        KEY_FILE,
        CONTROL,
        file("/usr/lib/systemd/system/mercuryd.service", "The unit of the daemon."),
    ])
    .see(&["systemctl(1)"]),
    Page::of(
        "identity",
        Group::Move,
        &[
            example("Show this machine's name", "mercury identity"),
            example("In a script", "mercury identity --json"),
        ],
    )
    .files(&[IDENTITY]),
    Page::of(
        "tombstone",
        Group::Move,
        &[
            example("Show the tombstone", "mercury tombstone"),
            example(
                "Make a place for the tombstone on a machine without UEFI",
                "mercury tombstone --prepare /boot/mercury.tombstone && update-initramfs -u",
            ),
            example(
                "Clear the tombstone: the system never runs elsewhere again",
                "mercury tombstone --clear",
            ),
        ],
    )
    .files(&[
        file(
            "/sys/firmware/efi/efivars/MercuryTombstone-b3391025-8533-46fd-88a9-0064a0d1c64e",
            "The tombstone on a machine with UEFI.",
        ),
        file("/etc/mercury/tombstone.places", "Places of tombstones on disks."),
    ])
    .see(&["update-initramfs(8)"]),
    Page::of(
        "guests",
        Group::Guests,
        &[
            example("Let the machine of an image go on as a guest", "mercury restore --as-guest /net/node7"),
            example(
                "Another one from the same image, on shared memory",
                "mercury restore --as-guest --name two --memory-file /var/tmp/node7 /net/node7",
            ),
            example("List the guests", "mercury guests list"),
        ],
    )
    .files(&[GUESTS])
    .see(&["mercury-restore(8)"]),
    Page::new(
        "guests list",
        &[
            example("List the guests", "mercury guests list"),
            example("Print their names", "mercury --json guests list | jq -r '.guests[].name'"),
        ],
    )
    .files(&[GUESTS]),
    Page::new(
        "guests console",
        &[example("Log in to a guest; Ctrl-A x leaves", "mercury guests console node7")],
    )
    .files(&[GUESTS]),
    Page::new(
        "guests adopt",
        &[example("Let a machine go on whose source is dead for certain", "mercury guests adopt node7")],
    )
    .files(&[GUESTS])
    .see(&["mercury-receive(8)", "mercury-tombstone(8)"]),
    Page::new(
        "guests discard",
        &[example("Discard a machine on its way here", "mercury guests discard node7")],
    )
    .files(&[GUESTS])
    .see(&["mercury-receive(8)"]),
    Page::new(
        "guests migrate",
        &[
            example("Send a guest back to its hardware", "mercury guests migrate node7 10.9.0.4 --key -"),
            example(
                "Stop it for half a second at most",
                "mercury guests migrate node7 10.9.0.4 --key - -- --max-downtime 500ms",
            ),
        ],
    )
    .files(&[GUESTS])
    .see(&["mercury-migrate(8)", "mercury-receive(8)"]),
    Page::new(
        "guests resume",
        &[example("Let a guest go on whose destination is off for certain", "mercury guests resume node7")],
    )
    .files(&[GUESTS])
    .see(&["mercury-guests-migrate(8)"]),
    Page::new(
        "guests abandon",
        &[example("End a guest here that runs at its destination", "mercury guests abandon node7")],
    )
    .files(&[GUESTS])
    .see(&["mercury-guests-migrate(8)"]),
    Page::new("guests stop", &[example("End a guest as a power cut would", "mercury guests stop node7")])
        .files(&[GUESTS]),
    Page::of(
        "hosted",
        Group::Hosted,
        &[example("Start a kernel with a disk", "mercury hosted run --kernel vmlinux --disk root.img")],
    )
    .see(&["afterburner(1)"]),
    Page::new(
        "hosted run",
        &[
            example(
                "Start a kernel with an initial file system",
                "mercury hosted run --kernel vmlinux --initramfs root.cpio",
            ),
            example(
                "Start it with a disk and 1 GiB of memory",
                "mercury hosted run --kernel vmlinux --disk root.img --memory 1G --append 'root=/dev/vda rw'",
            ),
            example(
                "Reach its SSH server at port 2222 of this host",
                "mercury hosted run --kernel vmlinux --disk root.img --net passt --forward 2222:22",
            ),
            example(
                "Run its programs in processes of their own",
                "mercury hosted run --kernel vmlinux --disk root.img --isolation=process",
            ),
            example(
                "Connect it with other machines of yours, and with the outside",
                "mercury hosted run --kernel vmlinux --disk root.img --net passt --net subnet=lab",
            ),
            example(
                "Start one with an image that machines share as memory; what it writes is gone at its end",
                "mercury hosted run --kernel vmlinux --initramfs root.cpio --disk data.img,private",
            ),
            example(
                "Start one with memory that other machines of yours write to, too",
                "mercury hosted run --kernel vmlinux --initramfs root.cpio --region pool,64M",
            ),
        ],
    )
    .see(&["afterburner(1)", "mercury-hosted-net(8)", "passt(1)"]),
    Page::new(
        "hosted gdb",
        &[
            example(
                "Start a machine that gdb can stop",
                "mercury hosted run --kernel vmlinux --initramfs root.cpio --gdb machine.gdb",
            ),
            example("Start gdb, in another terminal", "mercury hosted gdb --kernel vmlinux machine.gdb"),
        ],
    )
    .see(&["gdb(1)"]),
    Page::new(
        "hosted save",
        &[
            example(
                "Start a machine that can be saved",
                "mercury hosted run --kernel vmlinux --initramfs root.cpio --control machine.control",
            ),
            example("Save it, from another terminal", "mercury hosted save machine.control machine.saved"),
        ],
    ),
    Page::new(
        "hosted restore",
        &[example("Let it go on", "mercury hosted restore machine.saved --kernel vmlinux")],
    ),
    Page::new(
        "hosted net",
        &[
            example("Show all subnets and their machines", "mercury hosted net"),
            example(
                "Show the processes on one",
                "mercury --json hosted net lab | jq '.subnets[].machines[].pid'",
            ),
        ],
    )
    .see(&["mercury-hosted-run(8)"]),
    Page::of(
        "disco",
        Group::Hosted,
        &[
            example(
                "Make a template of a saved machine",
                "mercury disco template web machine.saved --kernel vmlinux",
            ),
            example("Start 32 machines as copies of it", "mercury disco run web --count 32"),
            example("Show what they share", "mercury disco map"),
        ],
    )
    .files(&[DISCO]),
    Page::new(
        "disco template",
        &[
            example(
                "Make a template of a machine that `mercury hosted save` has saved",
                "mercury disco template web machine.saved --kernel vmlinux --memory 256M",
            ),
            example(
                "Give its machines a disk of their own on one image",
                "mercury disco template web machine.saved --kernel vmlinux --disk root.img,private",
            ),
            example(
                "Keep it in the foreground, for a service manager",
                "mercury disco template web machine.saved --kernel vmlinux --foreground",
            ),
        ],
    )
    .files(&[DISCO]),
    Page::new(
        "disco run",
        &[
            example("Start a machine with its console on this terminal", "mercury disco run web"),
            example("Start 32 machines in the background", "mercury disco run web --count 32"),
            example(
                "Start one whose port 80 is this host's port 8080",
                "mercury disco run web --name shop --detach --forward 8080:80",
            ),
        ],
    )
    .files(&[DISCO]),
    Page::new(
        "disco fork",
        &[
            example("Start a copy of a machine as it is now", "mercury disco fork web-1"),
            example("Start 32 of them", "mercury disco fork web-1 --count 32"),
            example("Keep one before a change", "mercury disco fork web-1 --name before-upgrade"),
        ],
    )
    .files(&[DISCO]),
    Page::new(
        "disco save",
        &[
            example("Save a machine that runs on", "mercury disco save web-1 web-1.saved"),
            example("Start copies of it later", "mercury disco template later web-1.saved --kernel vmlinux"),
        ],
    )
    .files(&[DISCO]),
    Page::new(
        "disco resize",
        &[
            example("Leave a machine 64 MiB", "mercury disco resize web-1 64"),
            example("Give it all of its memory back", "mercury disco resize web-1 256"),
        ],
    )
    .files(&[DISCO]),
    Page::new(
        "disco sleep",
        &[
            example(
                "Make a template whose machines can sleep",
                "mercury disco template web machine.saved --kernel vmlinux --sleep-in asleep",
            ),
            example("Put a machine to sleep", "mercury disco sleep web-1"),
        ],
    )
    .files(&[DISCO]),
    Page::new("disco wake", &[example("Let a machine go on that is asleep", "mercury disco wake web-1")])
        .files(&[DISCO]),
    Page::new("disco list", &[example("List templates and machines", "mercury disco list")]).files(&[DISCO]),
    Page::new(
        "disco map",
        &[
            example("Show what is shared and what is not", "mercury disco map"),
            example(
                "Sum the machines' own memory",
                "mercury --json disco map | jq '[.machines[].own_bytes] | add'",
            ),
        ],
    )
    .files(&[DISCO]),
    Page::new("disco console", &[example("Join a machine's console", "mercury disco console web-1")])
        .files(&[DISCO]),
    Page::new("disco stop", &[example("End a machine as a power cut would", "mercury disco stop web-1")])
        .files(&[DISCO]),
    Page::new("disco rm", &[example("End a template and its machines", "mercury disco rm web")])
        .files(&[DISCO]),
    Page::of(
        "status",
        Group::Information,
        &[
            example("Show the status", "mercury status"),
            example("Show it again each second", "mercury status --watch"),
            example("Count the exits since load", "mercury --json status | jq '[.cpus[].exits_total] | add'"),
        ],
    ),
    Page::of("top", Group::Information, &[example("Show the status each second", "mercury top")]),
    Page::of(
        "log",
        Group::Information,
        &[
            example("Show the log", "mercury log"),
            example("Go on and show new entries", "mercury log --follow"),
        ],
    ),
    Page::of(
        "metrics",
        Group::Information,
        &[
            example("Print the metrics", "mercury metrics"),
            example(
                "Write them for node_exporter, readable by its group alone",
                "mercury metrics --textfile /var/lib/prometheus/node-exporter/mercury.prom --group \
                 prometheus",
            ),
            example("Write them every 15 seconds", "systemctl enable --now mercury-metrics.timer"),
        ],
    )
    .files(&[
        file(
            "/run/mercury/checkpoint.last, /run/mercury/migrate.last",
            "Outcomes since the start, in memory.",
        ),
        file("/usr/lib/systemd/system/mercury-metrics.timer", "The unit that runs this every 15 seconds."),
        file("/etc/default/mercury-metrics", "METRICS_OPTIONS=... for the unit, such as --group prometheus."),
    ])
    .see(&["prometheus-node-exporter(1)"]),
    Page::of(
        "explain",
        Group::Information,
        &[
            example("Explain a code by name", "mercury explain svm-disabled"),
            example("Explain a code by number", "mercury explain 43"),
            example("List all codes", "mercury explain"),
        ],
    ),
    Page::of(
        "bench",
        Group::Information,
        &[example("Measure the mode switch", "mercury bench switch --cycles 1000")],
    ),
    Page::new(
        "bench switch",
        &[example("Attach and detach a thousand times", "mercury bench switch --cycles 1000")],
    ),
    Page::new(
        "bench os",
        &[
            example("Measure natively and attached", "mercury bench os; mercury attach; mercury bench os"),
            example("Measure forks alone, more often", "mercury bench os --only fork --samples 101"),
        ],
    ),
];

/// Lists visible commands of a group in the order of their pages. `help` has no page, and is
/// information.
pub fn members(command: &Command, group: Group) -> Vec<&Command> {
    let pages = PAGES.iter().filter(|page| page.group == Some(group)).map(|page| page.command);
    let help = (group == Group::Information).then_some("help");
    pages
        .chain(help)
        .filter_map(|name| command.find_subcommand(name))
        .filter(|sub| !sub.is_hide_set())
        .collect()
}
