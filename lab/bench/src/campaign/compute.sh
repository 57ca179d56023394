#!/bin/bash
# The computation: sums of files, read from the disk each time, and hashes with known results. It notes each
# wrong result, and how far it is.
cd /run/campaign
n=0
while :; do
	[ "$(cat $(< files) | sha256sum)" = "$(< base)" ] || echo files >> compute.wrong
	mercury-workload --seconds 0.1 compute > /dev/null 2>&1 || echo computation >> compute.wrong
	echo $((n += 1)) > rounds.new && mv rounds.new rounds
	echo 1 > /proc/sys/vm/drop_caches
done
