"""Prints what each record of a dataset directory holds, knowing nothing but its schema: read_records.py OUT"""
import pathlib
import sys
import tensorflow as tf
import tensorflow_gnn as tfgnn

root = pathlib.Path(sys.argv[1])
spec = tfgnn.create_graph_spec_from_schema_pb(tfgnn.read_schema(str(root / 'schema.pbtxt')))
for record in tf.data.TFRecordDataset(sorted(map(str, root.glob('*/*.tfrecord')))):
  graph = tfgnn.parse_single_example(spec, record)
  sizes = {name: int(part.total_size) for name, part in [*graph.node_sets.items(), *graph.edge_sets.items()]}
  print(graph.context['module_id'][0].numpy().decode(), {**sizes, 'configs': len(graph.context['config_id'][0])})
