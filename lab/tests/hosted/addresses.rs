//! Programs that insist on addresses, in a machine whose memory takes these addresses: they work, or
//! they are refused and end by themselves. The machine goes on, and its kernel is as it was.

use mercury_lab::java;

use super::*;

/// Asks for addresses of 32 bits until none is left. New memory is zero, and stays what was written.
const LOW: &str = r#"
#define _GNU_SOURCE
#include <stdio.h>
#include <stdint.h>
#include <sys/mman.h>
#define SIZE (16 << 20)
int main(void) {
	char *all[256]; int count = 0, bad = 0;
	for (; count < 256; count++) {
		all[count] = mmap(0, SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_32BIT, -1, 0);
		if (all[count] == MAP_FAILED)
			break;
		if ((uintptr_t)all[count] + SIZE > 0x80000000)
			bad++;
		for (int at = 0; at < SIZE; at += 1 << 20)
			bad += all[count][at], all[count][at] = count + 1;
	}
	for (int i = 0; i < count; i++)
		for (int at = 0; at < SIZE; at += 1 << 20)
			bad += all[i][at] != (char)(i + 1);
	printf("low: %d given, %d bad\n", count, bad);
}
"#;

/// Grows its heap from the program's end, and maps memory as programs of old kernels do, until neither gives more.
/// New memory is zero, and stays what was written.
const COMPAT: &str = r#"
#define _GNU_SOURCE
#include <stdint.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/personality.h>
#include <unistd.h>
#define SIZE (16 << 20)
static char *all[512];
int main(int argc, char **argv) {
	int count = 0, mapped, bad = 0;
	if (!(personality(0xffffffff) & ADDR_COMPAT_LAYOUT)) {
		personality(ADDR_COMPAT_LAYOUT | ADDR_NO_RANDOMIZE);
		return execv(argv[0], argv);
	}
	while (count < 256 && (all[count] = sbrk(SIZE)) != (void *)-1)
		count++;
	printf("heap: from %p to %p\n", (void *)all[0], sbrk(0));
	for (mapped = 0; mapped < 256; mapped++)
		all[count + mapped] = mmap(0, SIZE, PROT_READ | PROT_WRITE,
					   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	printf("mapped: from %p to %p\n", (void *)all[count], (void *)(all[count + 255] + SIZE));
	for (int i = 0; i < count + mapped; i++)
		for (int at = 0; at < SIZE; at += 1 << 20)
			bad += all[i][at], all[i][at] = i % 100 + 1;
	for (int i = 0; i < count + mapped; i++)
		for (int at = 0; at < SIZE; at += 1 << 20)
			bad += all[i][at] != i % 100 + 1;
	printf("compat: %d parts of heap, %d bad\n", count, bad);
}
"#;

/// A loop that a checker of addresses or of threads watches.
const CHECKED: &str = "int main(void) { return 42; }";

/// The commands. The page cache is full when addresses are asked for again.
const COMMANDS: &str = "cd /run; gcc -O1 low.c -o low && ./low; \
    gcc -O1 -static -no-pie compat.c -o compat && ./compat; \
    gcc -fsanitize=address checked.c -o address && ./address; echo add''ress $?; \
    gcc -fsanitize=thread checked.c -o thread && ./thread; echo thr''ead $?; \
    cat /usr/lib/x86_64-linux-gnu/* > /dev/null 2>&1; ./low; echo st''ill $((40 + 2))";

fn use_addresses(isolation: &str) -> Result<()> {
    let place = Place::new("addresses")?;
    let disk = place.root_disk(&Image::ensure(Release::Bookworm)?)?;
    let mut machine = shell_with_memory(&place, &disk, "3072", &[isolation]);
    machine.type_line("mount -t tmpfs t /run");
    for (name, program) in [("low.c", LOW), ("compat.c", COMPAT), ("checked.c", CHECKED)] {
        machine.type_line(&format!("cat > /run/{name} <<'E''ND'"));
        program.lines().for_each(|line| machine.type_line(line));
        machine.type_line(&format!("END\necho wri''tten {name}"));
        // A terminal loses what is typed ahead of its reader by more than 4 KiB.
        machine.wait_within(LIMIT, &format!("written {name}\n"));
    }
    machine.type_line(COMMANDS);
    machine.wait_within(4 * LIMIT, "still 42\n");
    machine.type_line("mount -o remount,ro /dev/vda /; poweroff -f");
    let log = machine.end(HALTED);
    assert_well(&log);
    // The machine's memory takes all addresses from 1 to 2 GiB.
    assert_eq!(log.matches("low: 0 given, 0 bad\n").count(), 2, "{log}");
    let line = log.lines().find_map(|line| line.strip_prefix("compat: ")).expect("the heap's line");
    let (heap, bad) = line.split_once(" parts of heap, ").expect("a count");
    // The heap begins below the machine's memory, and ends there.
    assert!(bad == "0 bad" && (1..64).contains(&heap.parse().unwrap_or(0)), "{log}");
    for (program, status) in [("AddressSanitizer", "address "), ("ThreadSanitizer", "thread ")] {
        assert!(
            log.contains(program) && log.contains(status) && !log.contains(&format!("{status}42")),
            "{log}"
        );
    }
    Ok(())
}

#[test]
#[ignore = "long"]
fn programs_that_insist_on_addresses_never_get_the_kernel_s() -> Result<()> {
    use_addresses(ISOLATIONS[0])
}

#[test]
#[ignore = "long"]
fn programs_that_insist_on_addresses_do_so_in_processes_of_their_own() -> Result<()> {
    use_addresses(ISOLATIONS[1])
}

/// A program that fills 600 MiB, has garbage collected, and adds up what is left.
const HEAP: &str = r#"
public class Heap {
	static final int SIZE = 1 << 16, COUNT = 2400;
	public static void main(String[] words) {
		int[][] all = new int[COUNT][];
		long sum = 0;
		for (int i = 0; i < COUNT; i++) {
			all[i] = new int[SIZE];
			for (int at = 0; at < SIZE; at++) {
				if (all[i][at] != 0)
					throw new RuntimeException("new memory is not zero");
				all[i][at] = i * 31 + at;
			}
			new StringBuilder("garbage").append(new byte[1 << 18].length);
		}
		System.gc();
		for (int[] one : all)
			for (int value : one)
				sum += value;
		System.out.println("heap: " + sum);
	}
}
"#;

/// Returns what that program prints.
fn heap_s_sum() -> String {
    let (size, count) = (1_i64 << 16, 2400_i64);
    let sum = 31 * size * (count * (count - 1) / 2) + count * (size * (size - 1) / 2);
    format!("heap: {sum}\n")
}

/// Runs Java with a heap of 1 GiB in a machine of 3 GB, whose page cache is full before.
fn use_java(isolation: &str, cpus: &str) -> Result<()> {
    let place = Place::new("java")?;
    let disk = place.root_disk(&Image::ensure(Release::Bookworm)?)?;
    let java = format!("{},ro", place.name_for(&java::disk()?, "java.img")?.display());
    let options = ["--disk", &java, isolation, "--cpus", cpus];
    let mut machine = shell_with_memory(&place, &disk, "3072", &options);
    machine.type_line("mount -o ro /dev/vdb /mnt; mount -t proc p /mnt/proc; mount -t tmpfs t /mnt/tmp");
    machine.type_line("cat > /mnt/tmp/Heap.java <<'E''ND'");
    HEAP.lines().for_each(|line| machine.type_line(line));
    machine.type_line("END");
    machine.type_line(
        "cat /usr/lib/x86_64-linux-gnu/* /mnt/usr/lib/jvm/*/lib/* > /dev/null 2>&1; \
         cat /dev/vda | head -c 2500M > /dev/null",
    );
    let java = format!("chroot /mnt {} -Xmx1g -Xlog:gc+heap+coops=debug", java::JAVA);
    // Serial collects in one thread, G1 in several.
    for options in ["-XX:+UseSerialGC", "-XX:+UseG1GC -Xms1g -XX:+AlwaysPreTouch"] {
        machine.type_line(&format!("{java} {options} /tmp/Heap.java; echo ja''va $?"));
    }
    machine.type_line("echo st''ill $((40 + 2))");
    let start = Instant::now();
    machine.wait_within(4 * LIMIT, "still 42\n");
    println!("{isolation}, {cpus} processors: Java after {:?}", start.elapsed());
    machine.type_line("mount -o remount,ro /dev/vda /; poweroff -f");
    let log = machine.end(HALTED);
    // A word of Java's that is a kernel's complaint elsewhere.
    assert_well(&log.replace("Compressed Oops", ""));
    assert_eq!((log.matches("java 0\n").count(), log.matches(&heap_s_sum()).count()), (2, 2), "{log}");
    let heaps: Vec<_> = log.lines().filter_map(|line| line.split_once("Heap address: 0x")).collect();
    let heaps = heaps.iter().filter_map(|(_, rest)| u64::from_str_radix(&rest[..16], 16).ok());
    let outside = heaps.filter(|at| *at + (1 << 30) <= 0x3800_0000 || *at >= 0x4000_0000 + (3 << 30)).count();
    assert_eq!(outside, 2, "{log}");
    Ok(())
}

#[test]
#[ignore = "long"]
fn java_has_its_heap_outside_the_machine_s_memory() -> Result<()> {
    use_java(ISOLATIONS[0], "1")?;
    use_java(ISOLATIONS[0], "2")
}

#[test]
#[ignore = "long"]
fn java_has_its_heap_outside_in_processes_of_its_own() -> Result<()> {
    use_java(ISOLATIONS[1], "1")?;
    use_java(ISOLATIONS[1], "2")
}
