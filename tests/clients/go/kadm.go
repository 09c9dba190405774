// Prints what franz-go's kadm tells of one group, one topic and all log folders, as one JSON object: kminion, kcl, rpk and
// Redpanda Console show their lag, offsets and sizes by it.
//
//	kadm HOST:PORT[,...] GROUP TOPIC
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"
)

type partition struct {
	Leader          int32   `json:"leader"`
	Replicas        []int32 `json:"replicas"`
	ISR             []int32 `json:"isr"`
	OfflineReplicas []int32 `json:"offline_replicas"`
	Start           int64   `json:"start"`
	End             int64   `json:"end"`
}

type consumed struct {
	Committed int64  `json:"committed"`
	Lag       int64  `json:"lag"`
	ClientID  string `json:"client_id"`
	Host      string `json:"host"`
}

type answer struct {
	Brokers    []int32              `json:"brokers"`
	State      string               `json:"state"`
	Group      map[int32]consumed   `json:"group"`
	TotalLag   int64                `json:"total_lag"`
	Partitions map[int32]*partition `json:"partitions"`
	LogBytes   map[int32]int64      `json:"log_bytes"` // of the topic, by node
}

func main() {
	if err := run(os.Args[1], os.Args[2], os.Args[3]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(bootstrap, group, topic string) error {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	client, err := kgo.NewClient(kgo.SeedBrokers(strings.Split(bootstrap, ",")...))
	if err != nil {
		return err
	}
	defer client.Close()
	admin := kadm.NewClient(client)
	found := answer{Group: map[int32]consumed{}, Partitions: map[int32]*partition{}, LogBytes: map[int32]int64{}}

	metadata, err := admin.Metadata(ctx, topic)
	if err != nil {
		return err
	}
	found.Brokers = metadata.Brokers.NodeIDs()
	for _, detail := range metadata.Topics[topic].Partitions {
		found.Partitions[detail.Partition] = &partition{
			Leader: detail.Leader, Replicas: detail.Replicas, ISR: detail.ISR, OfflineReplicas: detail.OfflineReplicas,
		}
	}
	starts, err := admin.ListStartOffsets(ctx, topic)
	if err != nil {
		return err
	}
	ends, err := admin.ListEndOffsets(ctx, topic)
	if err != nil {
		return err
	}
	for index, shown := range found.Partitions {
		start, _ := starts.Lookup(topic, index)
		end, _ := ends.Lookup(topic, index)
		shown.Start, shown.End = start.Offset, end.Offset
	}

	lags, err := admin.Lag(ctx, group)
	if err != nil {
		return err
	}
	described := lags[group]
	if err := described.Error(); err != nil {
		return err
	}
	found.State, found.TotalLag = described.State, described.Lag.Total()
	for index, lag := range described.Lag[topic] {
		shown := consumed{Committed: lag.Commit.At, Lag: lag.Lag}
		if lag.Member != nil {
			shown.ClientID, shown.Host = lag.Member.ClientID, lag.Member.ClientHost
		}
		found.Group[index] = shown
	}

	folders, err := admin.DescribeAllLogDirs(ctx, nil)
	if err != nil {
		return err
	}
	folders.Each(func(folder kadm.DescribedLogDir) {
		folder.Topics.Each(func(size kadm.DescribedLogDirPartition) {
			if size.Topic == topic {
				found.LogBytes[folder.Broker] += size.Size
			}
		})
	})
	return json.NewEncoder(os.Stdout).Encode(found)
}
